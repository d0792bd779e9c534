// The gradients of a group norm or a batch norm from its output y = normal * weight + bias.

#pragma once

#include "normalize_backward_cuda.cuh"

namespace monet {

// As sums_of_parts, where a channel of an image is one row: a warp takes a stretch of it.
extern "C" __global__ void sums_of_stretches(const T* grad, const T* result, A* sums, const void* bias_data,
                                             int64_t bias_wide, int64_t rows, int64_t pixels, int64_t stretches,
                                             int64_t channels) {
  const Parameters bias(bias_data, bias_wide, 0);
  for (int64_t thread = first_index(); thread < rows * stretches * kWarp; thread += index_step()) {
    const int64_t warp = thread / kWarp, lane = thread % kWarp;
    const int64_t row = warp / stretches, stretch = warp % stretches;
    const int64_t image = row / channels, channel = row % channels;
    const T *g = grad + row * pixels, *y = result + row * pixels;
    const int64_t last = pixels * (stretch + 1) / stretches;
    const A b = bias[channel];
    A product = 0, plain = 0;
    for (int64_t i = pixels * stretch / stretches + lane; i < last; i += kWarp) {
      const A gradient = static_cast<A>(g[i]);
      product += gradient * (static_cast<A>(y[i]) - b);
      plain += gradient;
    }
    product = sum_of_warp(product);
    plain = sum_of_warp(plain);
    if (lane) continue;
    A* at = sums + 2 * (image * stretches + stretch) * channels + channel;
    at[0] = product;
    at[channels] = plain;
  }
}

// Mean and slope of each statistic, times its rstd: a warp takes one. A unit has so many groups of `depth` channels, so
// many parts, and `count` elements in each group.
extern "C" __global__ void statistics_from_sums(const A* sums, A* means, A* slopes, const void* weight_data,
                                                int64_t weight_wide, const void* rstd_data, int64_t rstd_wide,
                                                int64_t units, int64_t groups, int64_t depth, int64_t count,
                                                int64_t parts) {
  const Parameters weight(weight_data, weight_wide, 1), rstd(rstd_data, rstd_wide, 1);
  for (int64_t thread = first_index(); thread < units * groups * kWarp; thread += index_step()) {
    const int64_t statistic = thread / kWarp, lane = thread % kWarp;
    const int64_t unit = statistic / groups, first = statistic % groups * depth;
    A sum = 0, product = 0;
    const int64_t channels = groups * depth;
    for (int64_t i = lane; i < parts * depth; i += kWarp) {
      const int64_t part = unit * parts + i / depth, channel = first + i % depth;
      const A* at = sums + 2 * part * channels + channel;
      product += at[0];
      sum += at[channels] * weight[channel];
    }
    sum = sum_of_warp(sum);
    product = sum_of_warp(product);
    if (lane) continue;
    means[statistic] = sum / count * rstd[statistic];
    slopes[statistic] = product / count * rstd[statistic];
  }
}

// The gradient of the input, eight elements at a time. The channel of element i is i / inner % channels, its unit
// i / of_unit.
extern "C" __global__ void channel_norm_input(const T* grad, const T* result, T* to, const A* means, const A* slopes,
                                              const void* weight_data, int64_t weight_wide, const void* bias_data,
                                              int64_t bias_wide, const void* rstd_data, int64_t rstd_wide,
                                              int64_t count, int64_t inner, int64_t channels, int64_t of_unit,
                                              int64_t groups, int64_t depth, int64_t whole) {
  const Parameters weight(weight_data, weight_wide, 1), bias(bias_data, bias_wide, 0), rstd(rstd_data, rstd_wide, 1);
  for (int64_t p = first_index(); p < packs(count); p += index_step()) {
    const Pack gradients = load(grad, p, count, whole);
    Pack values = load(result, p, count, whole);
    int64_t at = p * kPack, channel = at / inner % channels, left = inner - at % inner;
    int64_t unit = at / of_unit, left_of_unit = of_unit - at % of_unit;
    A factor = 0, mean = 0, slope = 0, offset = 0;
    bool anew = true;
    for (int i = 0; i < kPack && at + i < count; ++i) {
      if (anew) {
        const int64_t statistic = unit * groups + channel / depth;
        const A w = weight[channel];
        factor = w * rstd[statistic];
        mean = means[statistic];
        slope = slopes[statistic] / w;
        offset = bias[channel];
      }
      const A gradient = static_cast<A>(gradients.values[i]), y = static_cast<A>(values.values[i]);
      values.values[i] = T(gradient * factor - mean - (y - offset) * slope);
      anew = --left == 0;
      if (anew) {
        left = inner;
        channel = channel + 1 == channels ? 0 : channel + 1;
      }
      if (--left_of_unit == 0) {
        left_of_unit = of_unit;
        ++unit;
      }
    }
    store(values, to, p, count, whole);
  }
}

}  // namespace monet
