// From a tensor's dtype to a kernel's type, on the CPU.
//
// To be included where monet::BFloat16 and monet::Half are defined.

#pragma once

#include "tensors.hpp"

namespace monet {

template <class T>
struct Typed {
  using type = T;
};

// body(Typed<T>{}) for the type of `t`'s elements.
template <class Body>
void for_dtype(const Tensor& t, Body body) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return body(Typed<float>{});
    case ScalarType::Double:
      return body(Typed<double>{});
    case ScalarType::BFloat16:
      return body(Typed<BFloat16>{});
    case ScalarType::Half:
      return body(Typed<Half>{});
    default:
      STD_TORCH_CHECK(false, "expected float32, float64, bfloat16 or float16");
  }
}

template <class T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* write(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace monet
