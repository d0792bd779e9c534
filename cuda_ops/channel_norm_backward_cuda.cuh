// The gradients of a group norm or a batch norm from its output y = normal * weight + bias.

#pragma once

#include "normalize_backward_cuda.cuh"

namespace monet {

// The pixels of a row that one warp sums up.
constexpr int64_t kStretch = 4096;

// As SumsOfPart, where a channel of an image is one row: a warp takes a stretch of it.
template <class T>
struct SumsOfStretch {
  using A = Arithmetic<T>;
  const T *grad, *result;
  A* sums;
  Parameters<T> bias;
  int64_t pixels, stretches, channels;

  __device__ void operator()(int64_t thread) const {
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
    if (lane) return;
    A* at = sums + 2 * (image * stretches + stretch) * channels + channel;
    at[0] = product;
    at[channels] = plain;
  }
};

// Mean and slope of each statistic, times its rstd: a warp takes one.
template <class T>
struct OfStatistics {
  using A = Arithmetic<T>;
  const A* sums;
  A *means, *slopes;
  Parameters<T> weight, rstd;
  int64_t groups, depth, count, parts;  // of a unit

  __device__ void operator()(int64_t thread) const {
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
    if (lane) return;
    means[statistic] = sum / count * rstd[statistic];
    slopes[statistic] = product / count * rstd[statistic];
  }
};

// The gradient of the input, eight elements at a time.
template <class T>
struct OfChannels {
  using A = Arithmetic<T>;
  const T *grad, *result;
  T* to;
  const A *means, *slopes;
  Parameters<T> weight, bias, rstd;
  // channel of element i: i / inner % channels; its unit: i / of_unit
  int64_t count, inner, channels, of_unit, groups, depth;
  bool whole;

  __device__ void operator()(int64_t p) const {
    const Pack<T> gradients = load(grad, p, count, whole);
    Pack<T> values = load(result, p, count, whole);
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
};

inline std::tuple<Tensor, Tensor, Tensor> channel_norm_output_backward(
    const Tensor& grad, const Tensor& result, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, std::vector<bool> output_mask) {
  const ChannelNormGradients norm(grad, result, rstd, output_mask);
  for_dtype(result, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const T *g = read<T>(grad), *y = read<T>(result);
    const int64_t channels = norm.channels, units = norm.units, statistics = units * norm.groups;
    const Parameters<T> weights(weight, result, channels, 1, "weight"), biases(bias, result, channels, 0, "bias");
    const Parameters<T> scales(rstd, result, statistics, 1, "rstd");
    const int64_t rows = norm.unit_images * norm.pixels;  // of a unit, of channels
    const int64_t stretches = std::max<int64_t>(1, (norm.pixels + kStretch - 1) / kStretch);
    const int64_t parts = norm.channels_last ? std::clamp<int64_t>(rows / kRowsPerPart, 1, kRowParts)
                                             : norm.unit_images * stretches;
    const auto kind = sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float;
    Tensor sums = torch::stable::new_empty(result, std::vector<int64_t>{units * parts * 2 * channels}, kind);
    if (norm.channels_last)
      launch(result, units * parts * channels,
             SumsOfPart<T>{g, y, write<A>(sums), biases, rows, channels, parts});
    else
      launch(result, norm.images * channels * stretches * kWarp,
             SumsOfStretch<T>{g, y, write<A>(sums), biases, norm.pixels, stretches, channels});
    launch(result, channels * kWarp,
           OfParameters<T>{read<A>(sums), output_mask[1] ? write<T>(norm.of_weight) : nullptr,
                           output_mask[2] ? write<T>(norm.of_bias) : nullptr, weights, channels, units * parts});
    if (!output_mask[0] || result.numel() == 0) return;
    Tensor of_statistics = torch::stable::new_empty(sums, std::vector<int64_t>{2 * statistics});
    A *means = write<A>(of_statistics), *slopes = means + statistics;
    launch(result, statistics * kWarp,
           OfStatistics<T>{read<A>(sums), means, slopes, weights, scales, norm.groups, norm.depth, norm.count(), parts});
    T* to = write<T>(norm.of_input);
    launch(result, packs(result.numel()),
           OfChannels<T>{g, y, to, means, slopes, weights, biases, scales, result.numel(),
                         norm.channels_last ? 1 : norm.pixels, channels, rows * channels, norm.groups, norm.depth,
                         aligned(g) && aligned(y) && aligned(to)});
  });
  return norm.all();
}

MONET_KERNEL(channel_norm_output_backward);

}  // namespace monet
