#include "engine/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace rallypoint {

#define DECLARE_LOOPS(name)                                                              \
  namespace name {                                                                       \
  Reducer reducer(DType dtype, ReduceOp op);                                             \
  bool scale(DType dtype, std::byte* target, const std::byte* source, std::size_t items, \
             double factor);                                                             \
  }
DECLARE_LOOPS(baseline)
#if defined(__x86_64__)
DECLARE_LOOPS(avx2)
DECLARE_LOOPS(avx512)
#endif

namespace {

#if defined(__x86_64__)
// Every CPU with AVX2 has F16C, but a hypervisor may hide it. The CPU is asked once, directly:
// clang 14 lacks __builtin_cpu_supports("f16c").
bool has_f16c() {
  static const bool has = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  }();
  return has;
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }
#endif

}  // namespace

Reducer reducer(DType dtype, ReduceOp op) {
#if defined(__x86_64__)
  if (has_avx512()) {
    if (const Reducer widest = avx512::reducer(dtype, op)) return widest;
  }
  if (has_avx2()) return avx2::reducer(dtype, op);
#endif
  return baseline::reducer(dtype, op);
}

bool scale(DType dtype, std::byte* target, const std::byte* source, std::size_t items,
           double factor) {
#if defined(__x86_64__)
  if (has_avx512()) return avx512::scale(dtype, target, source, items, factor);
  if (has_avx2()) return avx2::scale(dtype, target, source, items, factor);
#endif
  return baseline::scale(dtype, target, source, items, factor);
}

}  // namespace rallypoint
