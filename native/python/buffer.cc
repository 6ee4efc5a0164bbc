#include "python/buffer.h"

#include <cstring>

namespace nb = nanobind;

namespace rallypoint::python {
namespace {

// The parts of DLPack's C interface that are used here (dmlc/dlpack, include/dlpack/dlpack.h, 1.3).
struct DLDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t dimensions;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLExchange {
  std::uint32_t major;
  std::uint32_t minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* tensor);
  void* current_stream;
};
constexpr std::int32_t kCpu = 1;
constexpr std::uint32_t kMajor = 1;

// A type of tensors. Instances live as long as the process.
struct TensorType {
  PyTypeObject* type;
  const DLExchange* exchange;
  // Methods, or null. PyTorch's conjugated and negated views share the memory of their originals,
  // which DLPack does not express.
  PyObject* is_neg;
  PyObject* is_conj;
  PyObject* untyped_storage;
};

// The last type that was seen.
TensorType known{};

PyObject* method_of(PyTypeObject* type, const char* name) {
  PyObject* const method = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (method == nullptr) PyErr_Clear();
  return method;
}

// Null, without an error, if it fails.
PyObject* call(PyObject* method, PyObject* object) {
  PyObject* const answer = PyObject_Vectorcall(method, &object, 1, nullptr);
  if (answer == nullptr) PyErr_Clear();
  return answer;
}

// Whether a method, if there is one, says no.
bool denies(PyObject* method, PyObject* object) {
  if (method == nullptr) return true;
  PyObject* const answer = call(method, object);
  Py_XDECREF(answer);
  return answer == Py_False;
}

// Null if objects of this type are not tensors.
const TensorType* tensor_type(PyTypeObject* type) {
  if (type == known.type) return &known;
  const DLExchange* exchange = nullptr;
  auto* const object = reinterpret_cast<PyObject*>(type);
  if (PyObject* capsule = PyObject_GetAttrString(object, "__dlpack_c_exchange_api__")) {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api") != 0) {
      exchange =
          static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      if (exchange->major != kMajor || exchange->tensor_from_object == nullptr) exchange = nullptr;
    }
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  if (exchange == nullptr) return nullptr;
  for (PyObject* method : {known.is_neg, known.is_conj, known.untyped_storage}) {
    Py_XDECREF(method);
  }
  known = {type, exchange, method_of(type, "is_neg"), method_of(type, "is_conj"),
           method_of(type, "untyped_storage")};
  return &known;
}

std::optional<DType> dtype_of(const DLDataType& type) {
  enum Code : std::uint8_t { integer, natural, real, opaque, brain, complex, boolean };
  if (type.lanes != 1) return {};
  switch (type.code << 8 | type.bits) {
    case integer << 8 | 8:
      return DType::int8;
    case integer << 8 | 16:
      return DType::int16;
    case integer << 8 | 32:
      return DType::int32;
    case integer << 8 | 64:
      return DType::int64;
    case natural << 8 | 8:
      return DType::uint8;
    case natural << 8 | 16:
      return DType::uint16;
    case natural << 8 | 32:
      return DType::uint32;
    case natural << 8 | 64:
      return DType::uint64;
    case real << 8 | 16:
      return DType::float16;
    case real << 8 | 32:
      return DType::float32;
    case real << 8 | 64:
      return DType::float64;
    case brain << 8 | 16:
      return DType::bfloat16;
    case complex << 8 | 64:
      return DType::complex64;
    case complex << 8 | 128:
      return DType::complex128;
    case boolean << 8 | 8:
      return DType::boolean;
    default:
      return {};
  }
}

std::optional<DType> sized(std::ptrdiff_t bytes, bool is_signed) {
  switch (bytes) {
    case 1:
      return is_signed ? DType::int8 : DType::uint8;
    case 2:
      return is_signed ? DType::int16 : DType::uint16;
    case 4:
      return is_signed ? DType::int32 : DType::uint32;
    default:
      return is_signed ? DType::int64 : DType::uint64;
  }
}

// The struct module's letters, in native byte order; "Z" before a float is PEP 3118's complex.
std::optional<DType> dtype_of(const char* format, std::ptrdiff_t item) {
  if (format == nullptr) return DType::uint8;
  if (format[0] == 'Z' && format[1] != '\0' && format[2] == '\0') {
    if (format[1] == 'f') return DType::complex64;
    if (format[1] == 'd') return DType::complex128;
    return {};
  }
  if (format[0] == '\0' || format[1] != '\0') return {};
  switch (format[0]) {
    case 'f':
      return DType::float32;
    case 'd':
      return DType::float64;
    case 'e':
      return DType::float16;
    case '?':
      return DType::boolean;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      return sized(item, true);
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      return sized(item, false);
    default:
      return {};
  }
}

// The loops over the items rely on their natural alignment.
bool is_aligned(const std::byte* data, DType dtype) {
  const bool is_complex = dtype == DType::complex64 || dtype == DType::complex128;
  const std::size_t alignment = item_bytes(dtype) / (is_complex ? 2 : 1);
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

bool is_contiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t stride = 1;
  for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
  }
  for (std::int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

}  // namespace

View::View(nb::handle object, bool writable, std::optional<DType> as, bool held) {
  if (object.is_none()) return;
  kind_ = Kind::bad;
  if (!take_tensor(object, held)) take_buffer(object, writable);
  if (as && dtype_ && item_bytes(*as) == item_bytes(*dtype_)) dtype_ = as;
}

// Returns false if the object is not a tensor.
bool View::take_tensor(nb::handle object, bool held) {
  PyTypeObject* const type = Py_TYPE(object.ptr());
  // Looking up a missing attribute is slow: ask arrays for their buffer first.
  if (type != known.type && PyObject_CheckBuffer(object.ptr()) != 0) return false;
  const TensorType* const known_type = tensor_type(type);
  if (known_type == nullptr) return false;
  // The code below may run Python, which may look at other types.
  const TensorType is = *known_type;
  DLTensor tensor{};
  if (is.exchange->tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return true;
  }
  if (tensor.device.type != kCpu || !is_contiguous(tensor)) return true;
  std::uint64_t items = 1;
  for (std::int32_t i = 0; i < tensor.dimensions; ++i) {
    items *= static_cast<std::uint64_t>(tensor.shape[i]);
  }
  // A tensor may have a shape but no memory: a fake one, or one whose storage was freed.
  if (tensor.data == nullptr && items > 0) return true;
  const std::optional<DType> dtype = dtype_of(tensor.dtype);
  if (!dtype) return true;
  const bool is_complex = dtype == DType::complex64 || dtype == DType::complex128;
  std::byte* const data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  // What `tensor` points to belongs to PyTorch, and is no longer valid after that call.
  if ((items > 0 && !is_aligned(data, *dtype)) || !denies(is.is_neg, object.ptr())) return true;
  if (is_complex && !denies(is.is_conj, object.ptr())) return true;
  PyObject* owner = object.ptr();
  if (held && is.untyped_storage != nullptr) {
    owner = call(is.untyped_storage, owner);
    if (owner == nullptr) return true;
  } else {
    Py_INCREF(owner);
  }
  dtype_ = dtype;
  data_ = data;
  bytes_ = items * item_bytes(*dtype);
  buffer_.obj = owner;
  kind_ = Kind::tensor;
  return true;
}

void View::take_buffer(nb::handle object, bool writable) {
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
    PyErr_Clear();
    return;
  }
  kind_ = Kind::buffer;
  dtype_ = dtype_of(buffer_.format, buffer_.itemsize);
  data_ = static_cast<std::byte*>(buffer_.buf);
  bytes_ = static_cast<std::uint64_t>(buffer_.len);
  if (dtype_ && bytes_ > 0 && !is_aligned(data_, *dtype_)) dtype_.reset();
}

void View::release() {
  if (kind_ == Kind::buffer) PyBuffer_Release(&buffer_);
  if (kind_ == Kind::tensor) Py_DECREF(buffer_.obj);
  kind_ = Kind::none;
}

}  // namespace rallypoint::python
