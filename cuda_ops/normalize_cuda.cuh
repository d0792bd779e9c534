// Batch norm from saved statistics, the addition of a residual and clamping, in one pass.

#pragma once

#include "elements_cuda.cuh"

namespace monet {

// A vector of parameters, of the input's type or of the type of its arithmetic.
template <class T>
struct Parameters {
  using A = Arithmetic<T>;
  const T* kept = nullptr;
  const A* wide = nullptr;
  A otherwise = 0;

  Parameters(const std::optional<Tensor>& t, const Tensor& x, int64_t count, double absent, const char* name)
      : otherwise(static_cast<A>(absent)) {
    if (!t) return;
    STD_TORCH_CHECK(t->numel() == count && t->is_contiguous(), name, " must be ", count, " contiguous elements");
    if (t->scalar_type() == x.scalar_type()) {
      kept = read<T>(*t);
    } else {
      const auto expected = sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float;
      STD_TORCH_CHECK(t->scalar_type() == expected, name, " must be of the dtype of x, or of float32");
      wide = read<A>(*t);
    }
  }

  __device__ A operator[](int64_t c) const {
    return kept ? static_cast<A>(kept[c]) : wide ? wide[c] : otherwise;
  }
};

template <class T>
struct BatchNormAct {
  using A = Arithmetic<T>;
  const T *x, *residual;
  T* out;
  Parameters<T> weight, bias, mean, invstd;
  A low, high;
  // channel of element i: i / inner % channels
  int64_t count, inner, channels;
  bool whole;

  __device__ void operator()(int64_t p) const {
    Pack<T> values = load(x, p, count, whole);
    Pack<T> more;
    if (residual) more = load(residual, p, count, whole);
    int64_t channel = p * kPack / inner % channels, left = inner - p * kPack % inner;
    A scale = invstd[channel] * weight[channel], shift = bias[channel] - mean[channel] * scale;
    for (int i = 0; i < kPack && p * kPack + i < count; ++i) {
      T y = T(static_cast<A>(values.values[i]) * scale + shift);
      if (residual) y = T(static_cast<A>(y) + static_cast<A>(more.values[i]));
      A bounded = static_cast<A>(y);
      bounded = bounded < low ? low : bounded;
      bounded = bounded > high ? high : bounded;
      values.values[i] = T(bounded);
      if (--left == 0) {
        left = inner;
        channel = channel + 1 == channels ? 0 : channel + 1;
        scale = invstd[channel] * weight[channel];
        shift = bias[channel] - mean[channel] * scale;
      }
    }
    store(values, out, p, count, whole);
  }
};

inline Tensor batch_norm_act(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                             const Tensor& mean, const Tensor& invstd, const std::optional<Tensor>& residual,
                             double low, double high) {
  STD_TORCH_CHECK(x.dim() >= 2, "expected [N, C, ...], got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.is_contiguous() || is_channels_last(x), "x is neither contiguous nor channels-last");
  if (residual) check_same_layout(x, *residual, "x and residual");
  Tensor out = torch::stable::empty_like(x);
  if (x.numel() == 0) return out;
  const int64_t inner = x.is_contiguous() ? x.numel() / (x.size(0) * x.size(1)) : 1;
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const T* more = residual ? read<T>(*residual) : nullptr;
    const bool whole = aligned(read<T>(x)) && aligned(write<T>(out)) && aligned(more);
    const int64_t channels = x.size(1);
    launch(x, packs(x.numel()),
           BatchNormAct<T>{read<T>(x), more, write<T>(out), {weight, x, channels, 1, "weight"},
                           {bias, x, channels, 0, "bias"}, {mean, x, channels, 0, "mean"},
                           {invstd, x, channels, 1, "invstd"}, static_cast<A>(low), static_cast<A>(high), x.numel(),
                           inner, channels, whole});
  });
  return out;
}

MONET_KERNEL(batch_norm_act);

}  // namespace monet
