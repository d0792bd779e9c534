// Batch norm from saved statistics, the addition of a residual and clamping, in one pass.
//
// The arithmetic is that of ATen on the CPU, so that results are bitwise identical to the first run's: one multiply-add
// for each element, with a single rounding where the processor has that (compiled with -ffp-contract=fast).

#pragma once

#include "dispatch_cpu.hpp"

namespace monet {

// torch's clamp: NaN stays, and so does -0 with a lower bound of 0. NaN is no bound.
template <class V>
inline V clamp(V value, V low, V high) {
  value = value < low ? low : value;
  return value > high ? high : value;
}

template <class T>
struct Affine {
  using A = Arithmetic<T>;
  // padded by one register, so that the end of a row is computed like the rest
  std::vector<A> scale, shift;
  A low = std::numeric_limits<A>::quiet_NaN(), high = std::numeric_limits<A>::quiet_NaN();

  explicit Affine(int64_t channels) : scale(channels + Lanes<T>::kLanes), shift(channels + Lanes<T>::kLanes) {}

  // y = clamp(x * a + b (+ residual)) for `count` elements; `vary`: a and b have one value for each.
  template <bool vary, bool has_residual>
  void row(const T* x, const T* residual, T* y, const A* a, const A* b, int64_t count) const {
    using V = Values<T>;
    constexpr int64_t kLanes = Lanes<T>::kLanes;
    const V lowest = broadcast<V>(low), highest = broadcast<V>(high);
    V va = broadcast<V>(*a), vb = broadcast<V>(*b);
    const auto step = [&](const T* from, const T* more, T* to, int64_t i) {
      if constexpr (vary) {
        va = load_as<V>(a + i);
        vb = load_as<V>(b + i);
      }
      V value = load(from) * va + vb;
      if constexpr (has_residual) value = round_to<T>(value) + load(more);
      // rounding is monotonic, so that rounding once, after the bounds, is enough
      store(clamp(value, lowest, highest), to);
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) step(x + i, has_residual ? residual + i : nullptr, y + i, i);
    if (i == count) return;
    T from[kLanes] = {}, more[kLanes] = {}, to[kLanes];
    const size_t bytes = static_cast<size_t>(count - i) * sizeof(T);
    std::memcpy(from, x + i, bytes);
    if constexpr (has_residual) std::memcpy(more, residual + i, bytes);
    step(from, more, to, i);
    std::memcpy(y + i, to, bytes);
  }

  // x is [images, channels, pixels] in storage, or [images, pixels, channels] where `channels_last`.
  void run(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& out, int64_t images, int64_t channels,
           int64_t pixels, bool channels_last) const {
    const T* from = read<T>(x);
    const T* more = residual ? read<T>(*residual) : nullptr;
    T* to = write<T>(out);
    const int64_t rows = images * (channels_last ? pixels : channels);
    const int64_t length = channels_last ? channels : pixels;
    if (rows * length == 0) return;
    const int64_t grain = std::max<int64_t>(1, kBlock * kBlocksPerTask / length);
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t place = channels_last ? 0 : r % channels;
        const A *a = scale.data() + place, *b = shift.data() + place;
        const int64_t start = r * length;
        if (channels_last) {
          if (more)
            row<true, true>(from + start, more + start, to + start, a, b, length);
          else
            row<true, false>(from + start, nullptr, to + start, a, b, length);
        } else {
          if (more)
            row<false, true>(from + start, more + start, to + start, a, b, length);
          else
            row<false, false>(from + start, nullptr, to + start, a, b, length);
        }
      }
    });
  }
};

inline Tensor batch_norm_act(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                             const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                             double low, double high) {
  STD_TORCH_CHECK(x.dim() >= 2, "expected [N, C, ...], got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.is_contiguous() || is_channels_last(x), "x is neither contiguous nor channels-last");
  const bool channels_last = !x.is_contiguous() || x.dim() == 2;
  if (residual) check_same_layout(x, *residual, "x and residual");
  Tensor out = torch::stable::empty_like(x);
  const int64_t channels = x.size(1);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const auto weights = parameters<A>(weight, channels, A{1}, "weight");
    const auto biases = parameters<A>(bias, channels, A{0}, "bias");
    const auto means = parameters<A>(mean, channels, "mean"), invstds = parameters<A>(invstd, channels, "invstd");
    Affine<T> affine(channels);
    for (int64_t c = 0; c < channels; ++c) {
      affine.scale[c] = invstds[c] * weights[c];
      affine.shift[c] = biases[c] - means[c] * affine.scale[c];
    }
    affine.low = static_cast<A>(low);
    affine.high = static_cast<A>(high);
    const int64_t images = x.size(0), pixels = images * channels > 0 ? x.numel() / (images * channels) : 0;
    affine.run(x, residual, out, images, channels, pixels, channels_last);
  });
  return out;
}

MONET_KERNEL(batch_norm_act);

}  // namespace monet
