// The gradients of a normalization from its output y = normal * weight + bias, by normal = (y - bias) / weight.

#pragma once

#include "dispatch_cpu.hpp"
#include "normalize_backward.hpp"

#include <cmath>

namespace monet {

// Rows are summed up in at most kRowParts parts of at least kRowsPerPart rows: the sums do not depend on the
// number of threads.
constexpr int64_t kRowParts = 32, kRowsPerPart = 16;
// Rows that are worked on together, so that the values of each column are read and written once for all of them.
constexpr int64_t kRowsAtOnce = 2;

template <class V>
inline auto sum_of_lanes(V values) {
  using E = std::remove_cv_t<std::remove_reference_t<decltype(values[0])>>;
  if constexpr (sizeof(V) == 2 * sizeof(E)) {
    return values[0] + values[1];
  } else {
    Vector<E, sizeof(V) / 2> halves[2];
    std::memcpy(halves, &values, sizeof values);
    return sum_of_lanes(halves[0] + halves[1]);
  }
}

// One register from `from` on, or its first `count` elements and zeros.
template <class T>
inline Values<T> load_some(const T* from, int64_t elements) {
  T padded[Lanes<T>::kLanes] = {};
  std::memcpy(padded, from, elements * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_some(Values<T> value, T* to, int64_t elements) {
  T padded[Lanes<T>::kLanes];
  store(value, padded);
  std::memcpy(to, padded, elements * sizeof(T));
}

// What all rows of a layer norm share; its vectors are padded to whole registers.
template <class T>
struct LayerNormOutputBackward {
  using A = Arithmetic<T>;
  using V = Values<T>;
  static constexpr int64_t kLanes = Lanes<T>::kLanes;
  int64_t length;
  const A *weight, *bias, *inverse;

  // Rows that follow one another: adds to `products` (of grad * (y - bias)) and `plain` (of grad), and writes the
  // gradient of the input unless `to` is null.
  template <int64_t count>
  void rows(const T* grad, const T* result, const A* scale, A* products, A* plain, T* to) const {
    const int64_t stride = length, left = length % kLanes, whole = length - left;
    const A *weights = weight, *biases = bias, *inverses = inverse;
    V sum[count] = {}, product[count] = {};
    const auto add = [&](int64_t i, auto values_of) {
      const V w = load_as<V>(weights + i), b = load_as<V>(biases + i);
      V all = load_as<V>(products + i), gradients = load_as<V>(plain + i);
#pragma GCC unroll 4
      for (int64_t r = 0; r < count; ++r) {
        const V g = values_of(grad + r * stride + i), both = g * (values_of(result + r * stride + i) - b);
        sum[r] += g * w;
        product[r] += both;
        all += both;
        gradients += g;
      }
      store_as(products + i, all);
      store_as(plain + i, gradients);
    };
    for (int64_t i = 0; i < whole; i += kLanes) add(i, [](const T* from) { return load(from); });
    if (left) add(whole, [&](const T* from) { return load_some(from, left); });
    if (!to) return;
    const A share = 1 / static_cast<A>(length);
    for (int64_t r = 0; r < count; ++r) {  // one after the other, which is how memory is written fastest
      const V mean = broadcast<V>(sum_of_lanes(sum[r]) * share), scaled = broadcast<V>(scale[r]);
      const V slope = broadcast<V>(sum_of_lanes(product[r]) * share);
      const auto value = [&](int64_t i, V g, V y) {
        const V normal = (y - load_as<V>(biases + i)) * load_as<V>(inverses + i);
        return (g * load_as<V>(weights + i) - mean - normal * slope) * scaled;
      };
      const T *g = grad + r * stride, *y = result + r * stride;
      T* at = to + r * stride;
      for (int64_t i = 0; i < whole; i += kLanes) {
        // the rows that come next are fetched meanwhile
        __builtin_prefetch(g + count * stride + i);
        __builtin_prefetch(y + count * stride + i);
        store(value(i, load(g + i), load(y + i)), at + i);
      }
      if (left) store_some(value(whole, load_some(g + whole, left), load_some(y + whole, left)), at + whole, left);
    }
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
    constexpr int64_t kLanes = Lanes<T>::kLanes;
    const int64_t width = (length + kLanes - 1) / kLanes * kLanes;
    auto weights = parameters<A>(weight, length, A{1}, "weight"), biases = parameters<A>(bias, length, A{0}, "bias");
    std::vector<A> inverses(width);
    for (int64_t i = 0; i < length; ++i) inverses[i] = 1 / weights[i];
    weights.resize(width);
    biases.resize(width);
    const auto scales = parameters<A>(rstd, rows, "rstd");
    const int64_t parts = std::clamp<int64_t>(rows / kRowsPerPart, 1, kRowParts);
    const auto kind = sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float;
    // for each part the sums of grad * (y - bias), then of grad
    Tensor sums = torch::stable::new_empty(result, std::vector<int64_t>{parts * 2 * width}, kind);
    const LayerNormOutputBackward<T> layer{length, weights.data(), biases.data(), inverses.data()};
    const int64_t grain = kBlock * kBlocksPerTask * parts / std::max<int64_t>(1, rows * length);
    torch::stable::parallel_for(0, parts, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        A *products = write<A>(sums) + part * 2 * width, *plain = products + width;
        std::fill(products, products + 2 * width, A{0});
        const int64_t last = rows * (part + 1) / parts;
        for (int64_t r = rows * part / parts; r < last;) {
          const T *g = read<T>(grad) + r * length, *y = read<T>(result) + r * length;
          T* to = output_mask[0] ? write<T>(out.of_input) + r * length : nullptr;
          const bool several = r + kRowsAtOnce <= last;
          if (several)
            layer.template rows<kRowsAtOnce>(g, y, scales.data() + r, products, plain, to);
          else
            layer.template rows<1>(g, y, scales.data() + r, products, plain, to);
          r += several ? kRowsAtOnce : 1;
        }
      }
    });
    A* totals = write<A>(sums);
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = 0; i < 2 * width; ++i) totals[i] += totals[part * 2 * width + i];
    T *to_weight = write<T>(out.of_weight), *to_bias = write<T>(out.of_bias);
    for (int64_t i = 0; i < length; ++i) {
      if (output_mask[1]) narrow(totals[i] * inverses[i], to_weight + i);
      if (output_mask[2]) narrow(totals[width + i], to_bias + i);
    }
  });
  return out.all();
}

// Whether every weight can be divided by, and no bias exceeds `limit` times its weight.
inline Tensor affine_invertible(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double limit) {
  STD_TORCH_CHECK(weight || bias, "there is neither weight nor bias");
  const Tensor& like = weight ? *weight : *bias;
  bool holds = true;
  for_dtype(like, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const auto weights = parameters<A>(weight, like.numel(), A{1}, "weight");
    const auto biases = parameters<A>(bias, like.numel(), A{0}, "bias");
    // far enough from underflow and overflow that products with it keep all their digits
    const A least = std::numeric_limits<A>::min() / std::numeric_limits<A>::epsilon(), most = 1 / least;
    for (int64_t i = 0; i < like.numel(); ++i) {
      const A size = std::abs(weights[i]);
      holds &= size >= least && size <= most && std::abs(biases[i]) <= static_cast<A>(limit) * size;
    }
  });
  Tensor out = torch::stable::new_empty(like, std::vector<int64_t>{}, ScalarType::Bool);
  *static_cast<bool*>(out.mutable_data_ptr()) = holds;
  return out;
}

MONET_KERNEL(layer_norm_output_backward);
MONET_KERNEL(affine_invertible);

}  // namespace monet
