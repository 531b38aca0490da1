// The names of an operator: a file calls each of its function bodies by another one, and the kernels are the same.
#pragma once

#include <string>
#include <vector>

namespace qknorm::ort {

// `op`, which is kAttentionOp or kRotaryOp, and its numbered names `op`_2, `op`_3, ...; they live as long as the
// library.
const std::vector<std::string>& names_of(const char* op);

// The place of `name` among the names of its operator: 1 for the operator's own, 2 for the first numbered one, ...
int number_of(const std::string& name);

}  // namespace qknorm::ort
