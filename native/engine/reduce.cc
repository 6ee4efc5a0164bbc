#include "engine/reduce.h"

namespace rallypoint {

#define DECLARE_LOOPS(name)                  \
  namespace name {                           \
  Reducer reducer(DType dtype, ReduceOp op); \
  }
DECLARE_LOOPS(baseline)
#if defined(__x86_64__)
DECLARE_LOOPS(avx2)
DECLARE_LOOPS(avx512)
#endif

Reducer reducer(DType dtype, ReduceOp op) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return avx512::reducer(dtype, op);
  if (__builtin_cpu_supports("avx2")) return avx2::reducer(dtype, op);
#endif
  return baseline::reducer(dtype, op);
}

namespace {

template <typename T>
void divide_all(std::byte* bytes, std::size_t items, std::uint64_t divisor) {
  auto* const values = reinterpret_cast<T*>(bytes);
  const T by = static_cast<T>(divisor);
  for (std::size_t i = 0; i < items; ++i) values[i] /= by;
}

}  // namespace

void divide(DType dtype, std::byte* values, std::size_t items, std::uint64_t divisor) {
  switch (dtype) {
    case DType::float32:
      return divide_all<float>(values, items, divisor);
    case DType::float64:
      return divide_all<double>(values, items, divisor);
    case DType::int32:
      return divide_all<std::int32_t>(values, items, divisor);
    case DType::int64:
      return divide_all<std::int64_t>(values, items, divisor);
  }
}

}  // namespace rallypoint
