// The gradients of a normalization from its output y = normal * weight + bias, by normal = (y - bias) / weight.

#pragma once

#include "normalize_backward.hpp"
#include "normalize_cuda.cuh"

#include <limits>

namespace monet {

constexpr int kWarp = 32;
// Rows are summed up in at most kRowParts parts of at least kRowsPerPart rows: runs are identical, on any
// device.
constexpr int64_t kRowParts = 128, kRowsPerPart = 64;

// The sum over the lanes of a warp, in each of them.
template <class A>
__device__ inline A sum_of_warp(A value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

// The gradient of a row of the input: a warp takes a row.
template <class T>
struct OfInput {
  using A = Arithmetic<T>;
  const T *grad, *result;
  T* to;
  Parameters<T> weight, bias, rstd;
  int64_t length;

  __device__ void operator()(int64_t thread) const {
    const int64_t row = thread / kWarp, lane = thread % kWarp;
    const T *g = grad + row * length, *y = result + row * length;
    A sum = 0, product = 0;
    for (int64_t i = lane; i < length; i += kWarp) {
      const A gradient = static_cast<A>(g[i]);
      sum += gradient * weight[i];
      product += gradient * (static_cast<A>(y[i]) - bias[i]);
    }
    const A mean = sum_of_warp(sum) / length, slope = sum_of_warp(product) / length, scale = rstd[row];
    for (int64_t i = lane; i < length; i += kWarp) {
      const A w = weight[i], normal = (static_cast<A>(y[i]) - bias[i]) / w;
      to[row * length + i] = T((static_cast<A>(g[i]) * w - mean - normal * slope) * scale);
    }
  }
};

// Sums over the rows of a part, of grad * (y - bias) and then of grad: a thread takes a column. Units of so many rows,
// of which a layer norm is one, have so many parts each.
template <class T>
struct SumsOfPart {
  using A = Arithmetic<T>;
  const T *grad, *result;
  A* sums;
  Parameters<T> bias;
  int64_t rows, length, parts;

  __device__ void operator()(int64_t i) const {
    const int64_t place = i / length, column = i % length, unit = place / parts, part = place % parts;
    const int64_t first = unit * rows, last = first + rows * (part + 1) / parts;
    const A b = bias[column];
    A product = 0, plain = 0;
    for (int64_t row = first + rows * part / parts; row < last; ++row) {
      const A gradient = static_cast<A>(grad[row * length + column]);
      product += gradient * (static_cast<A>(result[row * length + column]) - b);
      plain += gradient;
    }
    sums[2 * place * length + column] = product;
    sums[(2 * place + 1) * length + column] = plain;
  }
};

// The gradients of a weight and a bias, those that are not null, from the sums of all parts: a warp takes a column.
template <class T>
struct OfParameters {
  using A = Arithmetic<T>;
  const A* sums;
  T *to_weight, *to_bias;
  Parameters<T> weight;
  int64_t length, parts;

  __device__ void operator()(int64_t thread) const {
    const int64_t column = thread / kWarp, lane = thread % kWarp;
    A product = 0, plain = 0;
    for (int64_t part = lane; part < parts; part += kWarp) {
      product += sums[2 * part * length + column];
      plain += sums[(2 * part + 1) * length + column];
    }
    product = sum_of_warp(product);
    plain = sum_of_warp(plain);
    if (lane) return;
    if (to_weight) to_weight[column] = T(product / weight[column]);
    if (to_bias) to_bias[column] = T(plain);
  }
};

inline std::tuple<Tensor, Tensor, Tensor> layer_norm_output_backward(
    const Tensor& grad, const Tensor& result, std::vector<int64_t> normalized_shape, const Tensor& rstd,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, std::vector<bool> output_mask) {
  const LayerNormGradients out(grad, result, normalized_shape, output_mask);
  const int64_t rows = out.rows, length = out.length;
  for_dtype(result, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const T *g = read<T>(grad), *y = read<T>(result);
    const Parameters<T> weights(weight, result, length, 1, "weight"), biases(bias, result, length, 0, "bias");
    if (output_mask[0])
      launch(result, rows * kWarp,
             OfInput<T>{g, y, write<T>(out.of_input), weights, biases, {rstd, result, rows, 1, "rstd"}, length});
    if (!output_mask[1] && !output_mask[2]) return;
    const int64_t parts = std::clamp<int64_t>(rows / kRowsPerPart, 1, kRowParts);
    const auto kind = sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float;
    Tensor sums = torch::stable::new_empty(result, std::vector<int64_t>{2 * parts * length}, kind);
    launch(result, parts * length, SumsOfPart<T>{g, y, write<A>(sums), biases, rows, length, parts});
    launch(result, length * kWarp,
           OfParameters<T>{read<A>(sums), output_mask[1] ? write<T>(out.of_weight) : nullptr,
                           output_mask[2] ? write<T>(out.of_bias) : nullptr, weights, length, parts});
  });
  return out.all();
}

// Whether every weight can be divided by, and no bias exceeds `limit` times its weight: for one warp.
template <class T>
struct IsInvertible {
  using A = Arithmetic<T>;
  Parameters<T> weight, bias;
  A least, limit;
  int64_t count;
  bool* to;

  __device__ void operator()(int64_t lane) const {
    bool holds = true;
    for (int64_t i = lane; i < count; i += kWarp) {
      const A w = weight[i], b = bias[i], size = w < 0 ? -w : w;
      holds = holds && size >= least && size <= 1 / least && (b < 0 ? -b : b) <= limit * size;
    }
    const bool all = __all_sync(0xffffffffu, holds);
    if (lane == 0) *to = all;
  }
};

inline Tensor affine_invertible(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double limit) {
  STD_TORCH_CHECK(weight || bias, "there is neither weight nor bias");
  const Tensor& given = weight ? *weight : *bias;
  Tensor out = torch::stable::new_empty(given, std::vector<int64_t>{}, ScalarType::Bool);
  for_dtype(given, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    // far enough from underflow and overflow that products with it keep all their digits
    const A least = std::numeric_limits<A>::min() / std::numeric_limits<A>::epsilon();
    const int64_t count = given.numel();
    launch(given, kWarp,
           IsInvertible<T>{{weight, given, count, 1, "weight"}, {bias, given, count, 0, "bias"}, least,
                           static_cast<A>(limit), count, static_cast<bool*>(out.mutable_data_ptr())});
  });
  return out;
}

MONET_KERNEL(layer_norm_output_backward);
MONET_KERNEL(affine_invertible);

}  // namespace monet
