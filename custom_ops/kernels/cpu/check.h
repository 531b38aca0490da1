// Turns the arguments of a call into a problem that the kernels can trust, or into a message for the caller.
#pragma once

#include <string>

#include "kernels/cpu/problem.h"

namespace qknorm {

// Each returns an empty string, or what is wrong: which input or attribute, what is expected, what was given.
std::string check_attributes(const spec::AttentionAttributes& attributes);
std::string check_attributes(const spec::RotaryAttributes& attributes);

// Fills everything but the outputs. Reads cache_length and query_offset.
std::string make_attention_problem(const spec::AttentionAttributes& attributes, const qknorm_tensor* inputs,
                                   AttentionProblem* problem);
std::string make_rotary_problem(const spec::RotaryAttributes& attributes, const qknorm_tensor* inputs,
                                RotaryProblem* problem);

}  // namespace qknorm
