// Normalization from saved statistics, in one pass over the input.
//
// The arithmetic is ATen's on the CPU, so that the bits are those of the first run: one multiply-add for each element,
// contracted into one rounding where the processor has that (this file is compiled with -ffp-contract=fast).

#pragma once

#include "dispatch_cpu.hpp"

namespace monet {

// torch's clamp: NaN stays, and so does -0 under a lower bound of 0. A bound of NaN is none.
template <class V>
inline V clamp(V value, V low, V high) {
  value = value < low ? low : value;
  return value > high ? high : value;
}

template <class T>
struct Affine {
  using A = Arithmetic<T>;
  // with a register's worth of room behind, so that the end of a row is computed like the rest
  std::vector<A> scale, shift;
  bool by_image = false, centred = false;
  A low = std::numeric_limits<A>::quiet_NaN(), high = std::numeric_limits<A>::quiet_NaN();

  Affine(int64_t count, bool each_image)
      : scale(count + Lanes<T>::kLanes), shift(count + Lanes<T>::kLanes), by_image(each_image) {}

  // y = clamp(x * a + b (+ residual)) for `count` elements; `vary` says whether a and b go along with them.
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
      V value = centred ? (load(from) + vb) * va : load(from) * va + vb;
      if constexpr (has_residual) value = round_to<T>(value) + load(more);
      // rounding keeps the order, so that once, after the bounds, is enough
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

  // x is [images, channels, pixels] in storage, or [images, pixels, channels] where `channels_last`. scale and shift
  // are [images or 1, channels].
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
        int64_t place;
        if (channels_last)
          place = by_image ? r / pixels * channels : 0;
        else
          place = by_image ? r : r % channels;
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

// How a [N, C, ...] tensor lies in memory: whether the channels are innermost.
inline bool channels_innermost(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 2, "expected [N, C, ...], got ", x.dim(), " dimensions");
  const bool plain = x.is_contiguous();
  STD_TORCH_CHECK(plain || is_channels_last(x), "x is neither contiguous nor channels-last");
  return !plain || x.dim() == 2;
}

inline Tensor batch_norm_act(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                             const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                             double low, double high) {
  const bool channels_last = channels_innermost(x);
  if (residual) check_same_layout(x, *residual, "x and residual");
  Tensor out = torch::stable::empty_like(x);
  const int64_t channels = x.size(1);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const auto weights = parameters<A>(weight, channels, A{1}, "weight");
    const auto biases = parameters<A>(bias, channels, A{0}, "bias");
    const auto means = parameters<A>(mean, channels, "mean"), invstds = parameters<A>(invstd, channels, "invstd");
    Affine<T> affine(channels, false);
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

inline Tensor group_norm_apply(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                               const Tensor& mean, const Tensor& rstd, int64_t groups) {
  const bool channels_last = channels_innermost(x);
  const int64_t images = x.size(0), channels = x.size(1);
  STD_TORCH_CHECK(groups > 0 && channels % groups == 0, channels, " channels are not a multiple of ", groups, " groups");
  Tensor out = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const auto weights = parameters<A>(weight, channels, A{1}, "weight");
    const auto biases = parameters<A>(bias, channels, A{0}, "bias");
    const auto means = parameters<A>(mean, images * groups, "mean"), rstds = parameters<A>(rstd, images * groups, "rstd");
    Affine<T> affine(images * channels, true);
    for (int64_t i = 0; i < images * channels; ++i) {
      const int64_t c = i % channels, g = i / (channels / groups);
      affine.scale[i] = rstds[g] * weights[c];
      affine.shift[i] = -affine.scale[i] * means[g] + biases[c];
    }
    const int64_t pixels = images * channels > 0 ? x.numel() / (images * channels) : 0;
    // without weight and bias ATen subtracts the mean first, unless the channels are innermost
    affine.centred = !weight && !bias && !channels_last;
    if (affine.centred)
      for (int64_t i = 0; i < images * channels; ++i) affine.shift[i] = -means[i / (channels / groups)];
    affine.run(x, std::nullopt, out, images, channels, pixels, channels_last);
  });
  return out;
}

inline Tensor layer_norm_apply(const Tensor& x, std::vector<int64_t> normalized_shape,
                               const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                               const Tensor& mean, const Tensor& rstd) {
  STD_TORCH_CHECK(x.is_contiguous(), "x is not contiguous");
  int64_t length = 1;
  for (const int64_t size : normalized_shape) length *= size;
  const int64_t rows = length ? x.numel() / length : 0;
  Tensor out = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    using V = Values<T>;
    constexpr int64_t kLanes = Lanes<T>::kLanes;
    auto weights = parameters<A>(weight, length, A{1}, "weight");
    auto biases = parameters<A>(bias, length, A{0}, "bias");
    weights.resize(length + kLanes);
    biases.resize(length + kLanes);
    const auto means = parameters<A>(mean, rows, "mean"), rstds = parameters<A>(rstd, rows, "rstd");
    const T* from = read<T>(x);
    T* to = write<T>(out);
    const int64_t grain = std::max<int64_t>(1, kBlock * kBlocksPerTask / std::max<int64_t>(length, 1));
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        constexpr bool reduced = sizeof(T) != sizeof(A);
        const V scale = broadcast<V>(rstds[r]), shift = broadcast<V>(reduced ? -rstds[r] * means[r] : -means[r]);
        const auto step = [&](const T* in, T* result, int64_t i) {
          const V shifts = load_as<V>(biases.data() + i), scales = load_as<V>(weights.data() + i);
          const V normal = reduced ? load(in) * scale + shift : (load(in) + shift) * scale;
          store(normal * scales + shifts, result);
        };
        const T* row = from + r * length;
        T* result = to + r * length;
        int64_t i = 0;
        for (; i + kLanes <= length; i += kLanes) step(row + i, result + i, i);
        if (i == length) continue;
        T ends[2][kLanes] = {};
        std::memcpy(ends[0], row + i, (length - i) * sizeof(T));
        step(ends[0], ends[1], i);
        std::memcpy(result + i, ends[1], (length - i) * sizeof(T));
      }
    });
  });
  return out;
}

}  // namespace monet
