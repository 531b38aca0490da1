// Chooses the kernels of the best instruction set that the processor has.
#pragma once

#include "kernels/cpu/problem.h"

namespace qknorm {

const KernelTable& kernels();

// False where the processor lacks the instruction set or the library was built without it.
bool select_kernels(const char* name);

}  // namespace qknorm
