// The gradients of a group norm or a batch norm from its output y = normal * weight + bias.

#pragma once

#include "normalize_backward_cpu.hpp"

namespace monet {

// An element's gradient is (grad * weight - mean - normal * slope) * rstd, where normal = (y - bias) / weight; mean and
// slope are the means of grad * weight and of grad * weight * normal over the elements that share a statistic.
template <class T>
struct ChannelNormOutputBackward {
  using A = Arithmetic<T>;
  using V = Values<T>;
  static constexpr int64_t kLanes = Lanes<T>::kLanes;
  const ChannelNormGradients& norm;
  const T *grad, *result;
  T* to;  // null where the gradient of the input is not wanted
  // one for each channel, padded by one register
  std::vector<A> weight, bias, inverse;
  std::vector<A> rstd;
  // for each unit and each of its parts: each channel's sum of grad * (y - bias), then each channel's sum of grad
  Tensor sums;
  int64_t width = 0, parts = 1;

  ChannelNormOutputBackward(const ChannelNormGradients& norm, const Tensor& grad, const Tensor& result,
                            const Tensor& rstd, const std::optional<Tensor>& weight,
                            const std::optional<Tensor>& bias, bool of_input)
      : norm(norm),
        grad(read<T>(grad)),
        result(read<T>(result)),
        to(of_input ? write<T>(norm.of_input) : nullptr),
        weight(parameters<A>(weight, norm.channels, A{1}, "weight")),
        bias(parameters<A>(bias, norm.channels, A{0}, "bias")),
        inverse(norm.channels + kLanes),
        rstd(parameters<A>(rstd, norm.units * norm.groups, "rstd")) {
    for (int64_t c = 0; c < norm.channels; ++c) inverse[c] = 1 / this->weight[c];
    this->weight.resize(norm.channels + kLanes);
    this->bias.resize(norm.channels + kLanes);
    width = (norm.channels + kLanes - 1) / kLanes * kLanes;
    const int64_t rows = norm.unit_images * norm.pixels;
    if (by_columns() && norm.units) {
      const int64_t share = (kRowParts + norm.units - 1) / norm.units;
      parts = std::clamp<int64_t>(rows / kRowsPerPart, 1, share);
    }
    sums = torch::stable::new_empty(result, std::vector<int64_t>{norm.units * parts * 2 * width}, kind());
  }

  // Whether a pixel's channels are adjacent in memory: always so in a batch norm of single pixels.
  bool by_columns() const { return norm.channels_last || (norm.of_batch && norm.pixels == 1); }
  static ScalarType kind() { return sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float; }
  A* sums_of(int64_t unit, int64_t part) const { return write<A>(sums) + (unit * parts + part) * 2 * width; }

  // One bit for each of the last lanes, `count` of them.
  static uint64_t last_lanes(int64_t count) { return ~uint64_t{0} << (kLanes - count); }
  static V only(V values, uint64_t kept) { return choose(kept, values, V{}); }

  // The lanes of a row beyond its last whole register; the others are 0.
  static V load_end(const T* row, int64_t count, int64_t left) {
    if (count < kLanes) return load_some(row, left);
    return only(load(row + count - kLanes), last_lanes(left));
  }

  // The sums of grad * (y - b) and of grad over a row of one channel.
  static void sum_row(const T* g, const T* y, A b, int64_t count, double& products, double& plain) {
    constexpr int64_t kChains = 4;
    const int64_t left = count % kLanes, whole = count - left;
    const V offset = broadcast<V>(b);
    V product[kChains] = {}, sum[kChains] = {};
    const auto add = [&](int64_t chain, V gradient, V value) {
      sum[chain] += gradient;
      product[chain] += gradient * (value - offset);
    };
    int64_t i = 0;
    for (; i + kChains * kLanes <= whole; i += kChains * kLanes) {
#pragma GCC unroll 4
      for (int64_t k = 0; k < kChains; ++k) add(k, load(g + i + k * kLanes), load(y + i + k * kLanes));
    }
    for (; i < whole; i += kLanes) add(0, load(g + i), load(y + i));
    if (left) add(1, load_end(g, count, left), load_end(y, count, left));
    products += sum_of_lanes((product[0] + product[1]) + (product[2] + product[3]));
    plain += sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }

  // Writes (g * w - mean - (y - b) * slope) * scale for a row of one channel.
  static void write_row(const T* g, const T* y, T* out, A w, A b, A mean, A slope, A scale, int64_t count) {
    const V factor = broadcast<V>(w), offset = broadcast<V>(b);
    const V means = broadcast<V>(mean), slopes = broadcast<V>(slope), scales = broadcast<V>(scale);
    const auto value = [&](V gradient, V y) {
      return (gradient * factor - means - (y - offset) * slopes) * scales;
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(value(load(g + i), load(y + i)), out + i);
    if (i == count) return;
    if (count < kLanes) return store_some(value(load_some(g, count), load_some(y, count)), out, count);
    i = count - kLanes;  // elements written twice get the same value
    store(value(load(g + i), load(y + i)), out + i);
  }

  // Where a channel of an image is one contiguous row: a thread takes all rows that share a statistic.
  void rows() const {
    const int64_t pixels = norm.pixels, statistics = norm.units * norm.groups;
    const int64_t grain = kBlock * kBlocksPerTask / std::max<int64_t>(1, norm.count());
    torch::stable::parallel_for(0, statistics, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        const int64_t unit = s / norm.groups, first = s % norm.groups * norm.depth, last = first + norm.depth;
        const int64_t image = unit * norm.unit_images, next = image + norm.unit_images;
        A *of_products = sums_of(unit, 0), *of_plain = of_products + width;
        double sum = 0, product = 0;
        for (int64_t c = first; c < last; ++c) {
          double products = 0, plain = 0;
          for (int64_t n = image; n < next; ++n) {
            const int64_t start = (n * norm.channels + c) * pixels;
            sum_row(grad + start, result + start, bias[c], pixels, products, plain);
          }
          sum += plain * weight[c];
          product += products;
          of_products[c] = static_cast<A>(products);
          of_plain[c] = static_cast<A>(plain);
        }
        if (!to) continue;
        const A mean = static_cast<A>(sum / norm.count()), slope = static_cast<A>(product / norm.count());
        for (int64_t c = first; c < last; ++c)
          for (int64_t n = image; n < next; ++n) {
            const int64_t start = (n * norm.channels + c) * pixels;
            write_row(grad + start, result + start, to + start, weight[c], bias[c], mean, slope * inverse[c], rstd[s],
                      pixels);
          }
      }
    });
  }

  // body(i, load, store) for the columns of a row from i on, one register at a time. The last register may overlap
  // the one before it: its repeated columns are 0 if each column is to be visited `once`.
  template <bool once, class Body>
  void for_columns(Body body) const {
    const int64_t channels = norm.channels, left = channels % kLanes;
    const auto load_all = [](const T* from) { return load(from); };
    const auto store_all = [](V value, T* at) { store(value, at); };
    for (int64_t i = 0; i + kLanes <= channels; i += kLanes) body(i, load_all, store_all);
    if (left == 0) return;
    if (channels < kLanes) {
      body(
          0, [left](const T* from) { return load_some(from, left); },
          [left](V value, T* at) { store_some(value, at, left); });
    } else if constexpr (once) {
      const auto kept = last_lanes(left);
      body(channels - kLanes, [kept](const T* from) { return only(load(from), kept); }, store_all);
    } else {
      body(channels - kLanes, load_all, store_all);
    }
  }

  // Adds up each column of consecutive rows.
  template <int64_t count>
  void sum_columns(const T* g, const T* y, A* products, A* plain) const {
    for_columns<true>([&](int64_t i, auto values_of, auto) {
      const V b = load_as<V>(bias.data() + i);
      V product = load_as<V>(products + i), sum = load_as<V>(plain + i);
#pragma GCC unroll 4
      for (int64_t r = 0; r < count; ++r) {
        const V gradient = values_of(g + r * norm.channels + i);
        sum += gradient;
        product += gradient * (values_of(y + r * norm.channels + i) - b);
      }
      store_as(products + i, product);
      store_as(plain + i, sum);
    });
  }

  // Where a pixel's channels are adjacent: columns are summed up, part by part, before anything is written.
  void columns() const {
    constexpr int64_t kAtOnce = 4;
    const int64_t rows = norm.unit_images * norm.pixels, channels = norm.channels;
    const int64_t of_part = std::max<int64_t>(1, rows * channels / parts);
    const int64_t grain = std::max<int64_t>(1, kBlock * kBlocksPerTask / of_part);
    torch::stable::parallel_for(0, norm.units * parts, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t unit = p / parts, part = p % parts, last = rows * (part + 1) / parts;
        A *products = sums_of(unit, part), *plain = products + width;
        std::fill(products, products + 2 * width, A{0});
        for (int64_t r = rows * part / parts; r < last;) {
          const int64_t start = (unit * rows + r) * channels;
          const bool several = r + kAtOnce <= last;
          if (several)
            sum_columns<kAtOnce>(grad + start, result + start, products, plain);
          else
            sum_columns<1>(grad + start, result + start, products, plain);
          r += several ? kAtOnce : 1;
        }
      }
    });
    for (int64_t unit = 0; unit < norm.units; ++unit) {
      A* totals = sums_of(unit, 0);
      for (int64_t part = 1; part < parts; ++part) {
        const A* more = sums_of(unit, part);
        for (int64_t i = 0; i < 2 * width; ++i) totals[i] += more[i];
      }
    }
    if (to) write_columns();
  }

  void write_columns() const {
    // for each unit and channel: weight * rstd, mean * rstd, slope * rstd / weight
    Tensor kept = torch::stable::new_empty(sums, std::vector<int64_t>{norm.units * 3 * width});
    for (int64_t s = 0; s < norm.units * norm.groups; ++s) {
      const int64_t unit = s / norm.groups, first = s % norm.groups * norm.depth;
      const A *products = sums_of(unit, 0), *plain = products + width;
      A* factors = write<A>(kept) + unit * 3 * width;
      double sum = 0, product = 0;
      for (int64_t c = first; c < first + norm.depth; ++c) {
        sum += static_cast<double>(plain[c]) * weight[c];
        product += products[c];
      }
      const A mean = static_cast<A>(sum / norm.count()), slope = static_cast<A>(product / norm.count());
      for (int64_t c = first; c < first + norm.depth; ++c) {
        factors[c] = weight[c] * rstd[s];
        factors[width + c] = mean * rstd[s];
        factors[2 * width + c] = slope * rstd[s] * inverse[c];
      }
    }
    const int64_t channels = norm.channels, rows = norm.unit_images * norm.pixels;
    const int64_t grain = std::max<int64_t>(1, kBlock * kBlocksPerTask / std::max<int64_t>(1, channels));
    torch::stable::parallel_for(0, norm.units * rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const A* factors = read<A>(kept) + r / rows * 3 * width;
        const T *g = grad + r * channels, *y = result + r * channels;
        T* out = to + r * channels;
        for_columns<false>([&](int64_t i, auto values_of, auto keep) {
          const V normal = (values_of(y + i) - load_as<V>(bias.data() + i)) * load_as<V>(factors + 2 * width + i);
          const V value = values_of(g + i) * load_as<V>(factors + i) - load_as<V>(factors + width + i) - normal;
          keep(value, out + i);
        });
      }
    });
  }

  // The gradients of weight and bias, from the sums of all units.
  void of_parameters(T* to_weight, T* to_bias) const {
    for (int64_t c = 0; c < norm.channels; ++c) {
      double products = 0, plain = 0;
      for (int64_t unit = 0; unit < norm.units; ++unit) {
        products += sums_of(unit, 0)[c];
        plain += sums_of(unit, 0)[width + c];
      }
      if (to_weight) narrow(static_cast<A>(products * inverse[c]), to_weight + c);
      if (to_bias) narrow(static_cast<A>(plain), to_bias + c);
    }
  }
};

inline std::tuple<Tensor, Tensor, Tensor> channel_norm_output_backward(
    const Tensor& grad, const Tensor& result, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, std::vector<bool> output_mask) {
  const ChannelNormGradients norm(grad, result, rstd, output_mask);
  for_dtype(result, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const ChannelNormOutputBackward<T> kernel(norm, grad, result, rstd, weight, bias, output_mask[0]);
    if (kernel.by_columns())
      kernel.columns();
    else
      kernel.rows();
    kernel.of_parameters(output_mask[1] ? write<T>(norm.of_weight) : nullptr,
                         output_mask[2] ? write<T>(norm.of_bias) : nullptr);
  });
  return norm.all();
}

MONET_KERNEL(channel_norm_output_backward);

}  // namespace monet
