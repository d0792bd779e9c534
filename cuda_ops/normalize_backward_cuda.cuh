// The gradients of a normalization from its output y = normal * weight + bias, by normal = (y - bias) / weight.

#pragma once

#include "normalize_cuda.cuh"

namespace monet {

constexpr int kWarp = 32, kFewRows = 8;

// The sum over the lanes of a warp, in each of them.
__device__ inline A sum_of_warp(A value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

// The gradient of the input: a warp takes a row.
extern "C" __global__ void layer_norm_input(const T* grad, const T* result, T* to, const void* weight_data,
                                            int64_t weight_wide, const void* bias_data, int64_t bias_wide,
                                            const void* rstd_data, int64_t rstd_wide, int64_t rows, int64_t length) {
  const Parameters weight(weight_data, weight_wide, 1), bias(bias_data, bias_wide, 0), rstd(rstd_data, rstd_wide, 1);
  for (int64_t thread = first_index(); thread < rows * kWarp; thread += index_step()) {
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
}

// Sums over the rows of a part, of grad * (y - bias) and then of grad: a thread takes a column. Units of so many rows,
// of which a layer norm is one, have so many parts each.
extern "C" __global__ void sums_of_parts(const T* grad, const T* result, A* sums, const void* bias_data,
                                         int64_t bias_wide, int64_t units, int64_t rows, int64_t length,
                                         int64_t parts) {
  const Parameters bias(bias_data, bias_wide, 0);
  for (int64_t i = first_index(); i < units * parts * length; i += index_step()) {
    const int64_t place = i / length, column = i % length, unit = place / parts, part = place % parts;
    const int64_t first = unit * rows, last = first + rows * (part + 1) / parts;
    const A b = bias[column];
    A product = 0, plain = 0;
    for (int64_t row = first + rows * part / parts; row < last;) {
      A few_products = 0, few = 0;  // sums of sums: long ones of float lose digits
      for (int i = 0; i < kFewRows && row < last; ++i, ++row) {
        const A gradient = static_cast<A>(grad[row * length + column]);
        few_products += gradient * (static_cast<A>(result[row * length + column]) - b);
        few += gradient;
      }
      product += few_products;
      plain += few;
    }
    sums[2 * place * length + column] = product;
    sums[(2 * place + 1) * length + column] = plain;
  }
}

// The gradients of a weight and a bias, those that are not null, from the sums of all parts: a warp takes a column.
extern "C" __global__ void parameters_from_sums(const A* sums, T* to_weight, T* to_bias, const void* weight_data,
                                                int64_t weight_wide, int64_t length, int64_t parts) {
  const Parameters weight(weight_data, weight_wide, 1);
  for (int64_t thread = first_index(); thread < length * kWarp; thread += index_step()) {
    const int64_t column = thread / kWarp, lane = thread % kWarp;
    A product = 0, plain = 0;
    for (int64_t part = lane; part < parts; part += kWarp) {
      product += sums[2 * part * length + column];
      plain += sums[(2 * part + 1) * length + column];
    }
    product = sum_of_warp(product);
    plain = sum_of_warp(plain);
    if (lane) continue;
    if (to_weight) to_weight[column] = T(product / weight[column]);
    if (to_bias) to_bias[column] = T(plain);
  }
}

// Whether every weight can be divided by, and no bias exceeds `limit` times its weight: for one warp.
extern "C" __global__ void affine_invertible(const void* weight_data, int64_t weight_wide, const void* bias_data,
                                             int64_t bias_wide, A least, A limit, int64_t count, bool* to) {
  const Parameters weight(weight_data, weight_wide, 1), bias(bias_data, bias_wide, 0);
  const int64_t lane = first_index();
  if (lane >= kWarp) return;
  bool holds = true;
  for (int64_t i = lane; i < count; i += kWarp) {
    const A w = weight[i], b = bias[i], size = w < 0 ? -w : w;
    holds = holds && size >= least && size <= 1 / least && (b < 0 ? -b : b) <= limit * size;
  }
  const bool all = __all_sync(0xffffffffu, holds);
  if (lane == 0) *to = all;
}

}  // namespace monet
