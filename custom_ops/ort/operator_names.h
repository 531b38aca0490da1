// The names of an operator: a file calls each of its function bodies by another one, and the kernels are the same.
#pragma once

#include <string>
#include <vector>

namespace qknorm::ort {

// `op`, which is kAttentionOp or kRotaryOp, and its numbered names `op`_2, `op`_3, ...; they live as long as the
// library.
const std::vector<std::string>& names_of(const char* op);

// Whether `name` is an operator's own name, not a numbered one.
bool is_first_name(const std::string& name);

}  // namespace qknorm::ort
