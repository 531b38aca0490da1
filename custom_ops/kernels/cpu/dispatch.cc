#include "kernels/cpu/dispatch.h"

#include <atomic>
#include <cstring>
#if defined(QKNORM_HAS_X86_KERNELS)
#include <cpuid.h>
#endif

namespace qknorm {

namespace portable {
extern const KernelTable kKernels;
}
#if defined(QKNORM_HAS_X86_KERNELS)
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
#endif

namespace {

#if defined(QKNORM_HAS_X86_KERNELS)
// Asked of the processor: clang before 15 does not know "f16c" as a name for __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

const KernelTable* find(const char* name) {
#if defined(QKNORM_HAS_X86_KERNELS)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (name == nullptr || std::strcmp(name, avx512::kKernels.name) == 0)) return &avx512::kKernels;
  if (has_avx2 && (name == nullptr || std::strcmp(name, avx2::kKernels.name) == 0)) return &avx2::kKernels;
#endif
  if (name == nullptr || std::strcmp(name, portable::kKernels.name) == 0) return &portable::kKernels;
  return nullptr;
}

std::atomic<const KernelTable*>& selected() {
  static std::atomic<const KernelTable*> table{find(nullptr)};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *selected().load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  const KernelTable* table = find(name);
  if (table != nullptr) selected() = table;
  return table != nullptr;
}

}  // namespace qknorm
