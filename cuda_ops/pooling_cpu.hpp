// Max pooling whose backward reads one byte for each window, the place of the largest element within it, or nothing
// but the input.
//
// The element is the one that ATen picks: the first of equal ones, the last NaN, the first of the window if none is
// greater than -inf. Gradients of windows that overlap are added in ATen's order, row by row of the output.

#pragma once

#include "dispatch_cpu.hpp"
#include "window.hpp"

namespace monet {

// The place of the largest element of the window that starts at (top, left) of one plane.
template <class T>
inline int64_t largest(const T* x, const Images& in, const Window& w, int64_t top, int64_t left) {
  const int64_t first_row = w.first(top, 0), last_row = w.last(top, 0, in.height);
  const int64_t first_column = w.first(left, 1), last_column = w.last(left, 1, in.width);
  auto best = -std::numeric_limits<Arithmetic<T>>::infinity();
  int64_t place = first_row * w.size[1] + first_column;
  for (int64_t i = first_row; i < last_row; ++i) {
    const T* row = x + (top + i * w.dilation[0]) * in.width;
    for (int64_t j = first_column; j < last_column; ++j) {
      const auto value = widen(row[left + j * w.dilation[1]]);
      if (value > best || value != value) {
        best = value;
        place = i * w.size[1] + j;
      }
    }
  }
  return place;
}

// The places of one window for all `channels`, which lie beside each other.
template <class T>
inline void largest_of_channels(const T* x, const Images& in, const Window& w, int64_t top, int64_t left,
                                Arithmetic<T>* best, uint8_t* places) {
  using A = Arithmetic<T>;
  const int64_t first_row = w.first(top, 0), last_row = w.last(top, 0, in.height);
  const int64_t first_column = w.first(left, 1), last_column = w.last(left, 1, in.width);
  std::fill(best, best + in.channels, -std::numeric_limits<A>::infinity());
  std::fill(places, places + in.channels, static_cast<uint8_t>(first_row * w.size[1] + first_column));
  for (int64_t i = first_row; i < last_row; ++i) {
    for (int64_t j = first_column; j < last_column; ++j) {
      const T* pixel = x + ((top + i * w.dilation[0]) * in.width + left + j * w.dilation[1]) * in.channels;
      const auto place = static_cast<uint8_t>(i * w.size[1] + j);
      for (int64_t c = 0; c < in.channels; ++c) {
        const A value = widen(pixel[c]);
        const bool larger = value > best[c] || value != value;
        best[c] = larger ? value : best[c];
        places[c] = larger ? place : places[c];
      }
    }
  }
}

inline Tensor max_pool2d_index(const Tensor& x, std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                               std::vector<int64_t> padding, std::vector<int64_t> dilation, bool ceil_mode) {
  const Window w(kernel_size, stride, padding, dilation);
  const Images in(x, "x");
  const int64_t rows = w.outputs(in.height, 0, ceil_mode), columns = w.outputs(in.width, 1, ceil_mode);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "the input of ", in.height, " x ", in.width, " is smaller than the window");
  Tensor index = new_images(x, sizes_of(x, rows, columns), ScalarType::Byte, in.channels_last);
  uint8_t* places = write<uint8_t>(index);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const T* from = read<T>(x);
    if (in.channels_last) {
      torch::stable::parallel_for(0, in.count * rows * columns, 1, [&](int64_t begin, int64_t end) {
        std::vector<Arithmetic<T>> best(in.channels);
        for (int64_t o = begin; o < end; ++o) {
          const int64_t n = o / (rows * columns), oh = o / columns % rows, ow = o % columns;
          largest_of_channels(from + n * in.image(), in, w, w.start(oh, 0), w.start(ow, 1), best.data(),
                              places + o * in.channels);
        }
      });
      return;
    }
    torch::stable::parallel_for(0, in.count * in.channels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane)
        for (int64_t oh = 0; oh < rows; ++oh)
          for (int64_t ow = 0; ow < columns; ++ow)
            places[(plane * rows + oh) * columns + ow] = static_cast<uint8_t>(
                largest(from + plane * in.plane(), in, w, w.start(oh, 0), w.start(ow, 1)));
    });
  });
  return index;
}

template <class T>
inline void add(T* to, T value) {
  narrow(widen(*to) + widen(value), to);
}

// What a task keeps while it finds the places of windows.
template <class T>
struct Scratch {
  std::vector<Arithmetic<T>> best;
  std::vector<uint8_t> places;
};

// Adds each element of `grad` to the place of its window in `to`, the gradient of the input `in`.
// places_of(unit, oh, ow, o, scratch) gives the places of output (oh, ow), whose first element is number o: one place
// of plane `unit`, or one for each channel of image `unit` where channels are innermost.
template <class T, class PlacesOf>
void scatter(const T* grad, T* to, const Images& in, const Window& w, int64_t rows, int64_t columns,
             PlacesOf places_of) {
  // images, or planes, run beside each other; the windows of one in ATen's order
  const int64_t width = in.channels_last ? in.channels : 1;
  const int64_t units = in.channels_last ? in.count : in.count * in.channels;
  // an index that this pooling did not give may lie outside of the plane: nothing is added there
  int64_t reach[256];
  std::fill(reach, reach + 256, std::numeric_limits<int64_t>::min() / 2);
  for (int64_t place = 0; place < w.size[0] * w.size[1]; ++place)
    reach[place] = (place / w.size[1] * w.dilation[0] * in.width + place % w.size[1] * w.dilation[1]) * width;
  torch::stable::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
    Scratch<T> scratch{std::vector<Arithmetic<T>>(width), std::vector<uint8_t>(width)};
    for (int64_t unit = begin; unit < end; ++unit) {
      T* image = to + unit * in.plane() * width;
      std::fill(image, image + in.plane() * width, T{});
      for (int64_t oh = 0; oh < rows; ++oh) {
        for (int64_t ow = 0; ow < columns; ++ow) {
          const int64_t o = ((unit * rows + oh) * columns + ow) * width;
          const uint8_t* places = places_of(unit, oh, ow, o, scratch);
          const int64_t corner = (w.start(oh, 0) * in.width + w.start(ow, 1)) * width;
          for (int64_t c = 0; c < width; ++c) {
            const int64_t at = corner + reach[places[c]] + c;
            if (at >= 0 && at < in.plane() * width) add(image + at, grad[o + c]);
          }
        }
      }
    }
  });
}

inline Tensor max_pool2d_index_backward(const Tensor& grad, const Tensor& index, std::vector<int64_t> input_size,
                                        std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                                        std::vector<int64_t> padding, std::vector<int64_t> dilation) {
  const Window w(kernel_size, stride, padding, dilation);
  const Images out(grad, "grad"), kept(index, "index");
  STD_TORCH_CHECK(static_cast<int64_t>(input_size.size()) == grad.dim(), "input_size and grad differ in dimensions");
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Byte && index.numel() == grad.numel() &&
                      (kept.channels_last == out.channels_last || is_channels_last(index) == out.channels_last),
                  "grad and index differ in shape or layout");
  Tensor result = new_images(grad, input_size, grad.scalar_type(), out.channels_last);
  Images in(result, "the input");
  in.channels_last = out.channels_last;
  const uint8_t* all = read<uint8_t>(index);
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    scatter(read<T>(grad), write<T>(result), in, w, out.height, out.width,
            [&](int64_t, int64_t, int64_t, int64_t o, Scratch<T>&) { return all + o; });
  });
  return result;
}

inline Tensor max_pool2d_input_backward(const Tensor& grad, const Tensor& x, std::vector<int64_t> kernel_size,
                                        std::vector<int64_t> stride, std::vector<int64_t> padding,
                                        std::vector<int64_t> dilation, bool ceil_mode) {
  const Window w(kernel_size, stride, padding, dilation);
  const Images in(x, "x"), out(grad, "grad");
  STD_TORCH_CHECK(grad.scalar_type() == x.scalar_type() && out.height == w.outputs(in.height, 0, ceil_mode) &&
                      out.width == w.outputs(in.width, 1, ceil_mode),
                  "grad is not of the output's shape and the input's dtype");
  STD_TORCH_CHECK(in.channels_last ? is_channels_last(grad) : grad.is_contiguous(), "grad and x differ in layout");
  Tensor result = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const T* from = read<T>(x);
    scatter(read<T>(grad), write<T>(result), in, w, out.height, out.width,
            [&](int64_t unit, int64_t oh, int64_t ow, int64_t, Scratch<T>& scratch) -> const uint8_t* {
              const int64_t top = w.start(oh, 0), left = w.start(ow, 1);
              if (in.channels_last)
                largest_of_channels(from + unit * in.image(), in, w, top, left, scratch.best.data(),
                                    scratch.places.data());
              else
                scratch.places[0] = static_cast<uint8_t>(largest(from + unit * in.plane(), in, w, top, left));
              return scratch.places.data();
            });
  });
  return result;
}

}  // namespace monet
