// Max pooling whose backward reads one byte for each window (the place of the largest element within it), or only the
// input.
//
// The element is the one ATen picks: the first of equal ones, the last NaN, the window's first if none exceeds -inf.
// Gradients of windows that overlap are added in ATen's order, row by row of the output.

#pragma once

#include "dispatch_cpu.hpp"
#include "images_cpu.hpp"

namespace monet {

// Finds the places of the largest elements, a register's worth of windows at a time: of the windows of one row of a
// plane, or of the channels of one pixel where those are innermost.
template <class T>
class Finder {
  using A = Arithmetic<T>;
  using V = Values<T>;
  using P = UnsignedLanes<T>;
  using Bits = Unsigned<T>;
  static constexpr int64_t kLanes = Lanes<T>::kLanes;
  static constexpr A kNone = -std::numeric_limits<A>::infinity();

  struct Best {
    V value = broadcast<V>(kNone);
    P place;

    void see(V candidate, int64_t k) {
      const auto larger = (candidate > value) | (candidate != candidate);
      value = larger ? candidate : value;
      place = larger ? broadcast<P>(static_cast<Bits>(k)) : place;
    }
  };

 public:
  Finder(const Images& in, const Window& w, int64_t columns) : in_(in), w_(w), columns_(columns) {
    if (in.channels_last) return;
    span_ = columns + (w.size[1] - 1) * w.dilation[1] / w.stride[1] + kLanes;
    // elements that are not written over are padding, which is never the largest
    phases_.assign(static_cast<size_t>(w.size[0] * w.stride[1] * span_), kNone);
    line_.resize(in.width + kLanes);
    first_.resize(columns + kLanes);
    for (int64_t ow = 0; ow < columns; ++ow) first_[ow] = static_cast<Bits>(w.first(w.start(ow, 1), 1));
  }

  // places[0 .. columns * channels) of row `oh` of the output; x is a plane, or an image with its channels innermost.
  void row(const T* x, int64_t oh, uint8_t* places) {
    if (in_.channels_last) {
      for (int64_t ow = 0; ow < columns_; ++ow) pixel(x, oh, ow, places + ow * in_.channels);
      return;
    }
    const int64_t top = w_.start(oh, 0), first = w_.first(top, 0), last = w_.last(top, 0, in_.height);
    for (int64_t i = first; i < last; ++i) spread(x + (top + i * w_.dilation[0]) * in_.width, i);
    for (int64_t ow = 0; ow < columns_; ow += kLanes) {
      Best best;
      best.place = load_as<P>(first_.data() + ow) + static_cast<Bits>(first * w_.size[1]);
      for (int64_t i = first; i < last; ++i)
        for (int64_t j = 0; j < w_.size[1]; ++j)
          best.see(load_as<V>(phase(i, j * w_.dilation[1] % w_.stride[1]) + j * w_.dilation[1] / w_.stride[1] + ow),
                   i * w_.size[1] + j);
      keep(best.place, places + ow, columns_ - ow);
    }
  }

 private:
  A* phase(int64_t i, int64_t p) { return phases_.data() + (i * w_.stride[1] + p) * span_; }

  // Row `i` of a window: columns that are a stride apart beside each other, so that windows beside each other are lanes.
  void spread(const T* row, int64_t i) {
    const A* line = reinterpret_cast<const A*>(row);
    if constexpr (!std::is_same_v<T, A>) {
      int64_t c = 0;
      for (; c + kLanes <= in_.width; c += kLanes) store_as(line_.data() + c, load(row + c));
      for (; c < in_.width; ++c) line_[c] = widen(row[c]);
      line = line_.data();
    }
    const int64_t stride = w_.stride[1], padding = w_.padding[1];
    for (int64_t p = 0; p < stride; ++p) {
      A* to = phase(i, p);
      const int64_t begin = p >= padding ? 0 : (padding - p + stride - 1) / stride;
      const int64_t end = std::min(span_, (in_.width + padding - p + stride - 1) / stride);
      const A* from = line + p - padding;
      for (int64_t u = begin; u < end; ++u) to[u] = from[u * stride];
    }
  }

  void pixel(const T* x, int64_t oh, int64_t ow, uint8_t* places) {
    const int64_t top = w_.start(oh, 0), left = w_.start(ow, 1);
    const int64_t last_row = w_.last(top, 0, in_.height), last_column = w_.last(left, 1, in_.width);
    const int64_t first_row = w_.first(top, 0), first_column = w_.first(left, 1);
    for (int64_t c = 0; c < in_.channels; c += kLanes) {
      Best best;
      best.place = broadcast<P>(static_cast<Bits>(first_row * w_.size[1] + first_column));
      for (int64_t i = first_row; i < last_row; ++i) {
        for (int64_t j = first_column; j < last_column; ++j) {
          const int64_t at = (top + i * w_.dilation[0]) * in_.width + left + j * w_.dilation[1];
          best.see(some(x + at * in_.channels + c, in_.channels - c), i * w_.size[1] + j);
        }
      }
      keep(best.place, places + c, in_.channels - c);
    }
  }

  static V some(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    std::copy(from, from + count, padded);
    return load(padded);
  }

  static void keep(P place, uint8_t* places, int64_t count) {
    const auto bytes = __builtin_convertvector(place, Vector<uint8_t, kLanes>);
    std::memcpy(places, &bytes, static_cast<size_t>(std::min(count, kLanes)));
  }

  Images in_;
  Window w_;
  int64_t columns_, span_ = 0;
  std::vector<A> phases_, line_;
  std::vector<Bits> first_;
};

// The units that tasks work on: images where channels are innermost, otherwise planes.
struct Units {
  int64_t count, width;
  explicit Units(const Images& in)
      : count(in.channels_last ? in.count : in.count * in.channels), width(in.channels_last ? in.channels : 1) {}
};

inline Tensor max_pool2d_index(const Tensor& x, std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                               std::vector<int64_t> padding, std::vector<int64_t> dilation, bool ceil_mode) {
  const Window w = window_of(kernel_size, stride, padding, dilation);
  const Images in(x, "x");
  const int64_t rows = w.outputs(in.height, 0, ceil_mode), columns = w.outputs(in.width, 1, ceil_mode);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "the input of ", in.height, " x ", in.width, " is smaller than the window");
  Tensor index = new_images(x, sizes_of(x, rows, columns), ScalarType::Byte, in.channels_last);
  uint8_t* places = write<uint8_t>(index);
  const Units units(in);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const T* from = read<T>(x);
    torch::stable::parallel_for(0, units.count * rows, 1, [&](int64_t begin, int64_t end) {
      Finder<T> finder(in, w, columns);
      for (int64_t r = begin; r < end; ++r)
        finder.row(from + r / rows * in.plane() * units.width, r % rows, places + r * columns * units.width);
    });
  });
  return index;
}

template <class T>
inline void add(T* to, T value) {
  narrow(widen(*to) + widen(value), to);
}

// Adds each element of `grad` to the place of its window in `to`, the gradient of the input `in`.
// row_of() makes, for each task, a function (unit, oh, first) of the places of row `oh` of a unit of the output, whose
// first element is number `first`.
template <class T, class RowOf>
void scatter(const T* grad, T* to, const Images& in, const Window& w, int64_t rows, int64_t columns, RowOf row_of) {
  // units run beside each other; the windows of one in ATen's order
  const Units units(in);
  const int64_t width = units.width;
  const uint64_t size = in.plane() * width;
  int64_t reach[256] = {};
  for (int64_t place = 0; place < w.size[0] * w.size[1]; ++place)
    reach[place] = (place / w.size[1] * w.dilation[0] * in.width + place % w.size[1] * w.dilation[1]) * width;
  torch::stable::parallel_for(0, units.count, 1, [&](int64_t begin, int64_t end) {
    auto row = row_of();
    for (int64_t unit = begin; unit < end; ++unit) {
      T* image = to + unit * in.plane() * width;
      std::fill(image, image + in.plane() * width, T{});
      for (int64_t oh = 0; oh < rows; ++oh) {
        const int64_t first = (unit * rows + oh) * columns * width;
        const uint8_t* places = row(unit, oh, first);
        const T* from = grad + first;
        int64_t corner = (w.start(oh, 0) * in.width - w.padding[1]) * width;
        for (int64_t ow = 0; ow < columns; ++ow, corner += w.stride[1] * width)
          for (int64_t c = 0; c < width; ++c, ++places, ++from) {
            const uint64_t at = corner + reach[*places] + c;
            if (at < size) add(image + at, *from);  // a made-up index may name a place in the padding
          }
      }
    }
  });
}

inline Tensor max_pool2d_index_backward(const Tensor& grad, const Tensor& index, std::vector<int64_t> input_size,
                                        std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                                        std::vector<int64_t> padding, std::vector<int64_t> dilation,
                                        bool channels_last) {
  const Window w = window_of(kernel_size, stride, padding, dilation);
  const Images out(grad, "grad", channels_last);
  check_index(grad, index, out, input_size);
  Tensor result = new_images(grad, input_size, grad.scalar_type(), out.channels_last);
  Images in(result, "the input");
  in.channels_last = out.channels_last;
  const uint8_t* all = read<uint8_t>(index);
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    scatter(read<T>(grad), write<T>(result), in, w, out.height, out.width,
            [&] { return [&](int64_t, int64_t, int64_t first) { return all + first; }; });
  });
  return result;
}

inline Tensor max_pool2d_input_backward(const Tensor& grad, const Tensor& x, std::vector<int64_t> kernel_size,
                                        std::vector<int64_t> stride, std::vector<int64_t> padding,
                                        std::vector<int64_t> dilation, bool ceil_mode) {
  const Window w = window_of(kernel_size, stride, padding, dilation);
  const Images in(x, "x"), out(grad, "grad");
  check_pooled(grad, x, in, out, w, ceil_mode);
  Tensor result = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const T* from = read<T>(x);
    const int64_t image = in.plane() * Units(in).width, row_places = out.width * Units(in).width;
    scatter(read<T>(grad), write<T>(result), in, w, out.height, out.width, [&] {
      return [&, finder = Finder<T>(in, w, out.width), places = std::vector<uint8_t>(row_places)](
                 int64_t unit, int64_t oh, int64_t) mutable -> const uint8_t* {
        finder.row(from + unit * image, oh, places.data());
        return places.data();
      };
    });
  });
  return result;
}

MONET_KERNEL(max_pool2d_index);
MONET_KERNEL(max_pool2d_index_backward);
MONET_KERNEL(max_pool2d_input_backward);

}  // namespace monet
