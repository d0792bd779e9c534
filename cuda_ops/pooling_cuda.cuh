// Max pooling that keeps one byte for each window, or nothing. The gradient is gathered: each element of the input
// reads the windows that cover it, in the order of the output, so that runs are identical.

#pragma once

#include "elements_cuda.cuh"
#include "window.hpp"

namespace monet {

// Where an element of a tensor lies: its image, channel, row and column.
struct Place {
  int64_t image, channel, row, column;
};

__host__ __device__ inline Place place_of(int64_t i, int64_t channels, int64_t height, int64_t width, bool last) {
  Place at;
  if (last) {
    at.channel = i % channels;
    i /= channels;
  }
  at.column = i % width;
  i /= width;
  at.row = i % height;
  i /= height;
  if (!last) {
    at.channel = i % channels;
    i /= channels;
  }
  at.image = i;
  return at;
}

// One channel of one image: the element at (row, column) is data[(row * width + column) * step].
template <class T>
struct Plane {
  const T* data;
  int64_t height, width, step;

  __device__ Plane(const T* all, const Images& of, int64_t image, int64_t channel)
      : data(all + image * of.image() + (of.channels_last ? channel : channel * of.plane())),
        height(of.height),
        width(of.width),
        step(of.channels_last ? of.channels : 1) {}
  __device__ T operator()(int64_t row, int64_t column) const { return data[(row * width + column) * step]; }
};

// The place of the largest element of the window that starts at (top, left): as ATen picks it.
template <class T>
__device__ inline int largest(const Plane<T>& x, const Window& w, int64_t top, int64_t left) {
  const int64_t last_row = w.last(top, 0, x.height), last_column = w.last(left, 1, x.width);
  const int64_t first_row = w.first(top, 0), first_column = w.first(left, 1);
  int64_t place = first_row * w.size[1] + first_column;
  Arithmetic<T> best = -INFINITY;
  for (int64_t i = first_row; i < last_row; ++i) {
    for (int64_t j = first_column; j < last_column; ++j) {
      const auto value = static_cast<Arithmetic<T>>(x(top + i * w.dilation[0], left + j * w.dilation[1]));
      if (value > best || value != value) {
        best = value;
        place = i * w.size[1] + j;
      }
    }
  }
  return static_cast<int>(place);
}

template <class T>
struct PoolIndex {
  const T* x;
  uint8_t* index;
  Images in;
  Window w;
  int64_t rows, columns;

  __device__ void operator()(int64_t o) const {
    const Place at = place_of(o, in.channels, rows, columns, in.channels_last);
    const Plane<T> plane(x, in, at.image, at.channel);
    index[o] = static_cast<uint8_t>(largest(plane, w, w.start(at.row, 0), w.start(at.column, 1)));
  }
};

template <class T>
struct KeptPlaces {
  const uint8_t* index;
  __device__ int operator()(const Window&, const Images& out, const Place& at, int64_t oh, int64_t ow) const {
    return Plane<uint8_t>(index, out, at.image, at.channel)(oh, ow);
  }
};

template <class T>
struct PlacesAgain {
  const T* x;
  Images in;
  __device__ int operator()(const Window& w, const Images&, const Place& at, int64_t oh, int64_t ow) const {
    return largest(Plane<T>(x, in, at.image, at.channel), w, w.start(oh, 0), w.start(ow, 1));
  }
};

template <class T, class Places>
struct PoolBackward {
  const T* grad;
  T* to;
  Images in, out;
  Window w;
  Places places;

  // The output whose window has the element at `at` in its place k, along one dimension; -1 where there is none.
  __device__ int64_t output(int64_t at, int64_t k, int d, int64_t outputs) const {
    const int64_t start = at + w.padding[d] - k * w.dilation[d];
    return start >= 0 && start % w.stride[d] == 0 && start / w.stride[d] < outputs ? start / w.stride[d] : -1;
  }

  __device__ void operator()(int64_t i) const {
    const Place at = place_of(i, in.channels, in.height, in.width, in.channels_last);
    const Plane<T> gradient(grad, out, at.image, at.channel);
    Arithmetic<T> sum = 0;
    for (int64_t kh = w.size[0] - 1; kh >= 0; --kh) {
      const int64_t oh = output(at.row, kh, 0, out.height);
      if (oh < 0) continue;
      for (int64_t kw = w.size[1] - 1; kw >= 0; --kw) {
        const int64_t ow = output(at.column, kw, 1, out.width);
        if (ow >= 0 && places(w, out, at, oh, ow) == kh * w.size[1] + kw)
          sum += static_cast<Arithmetic<T>>(gradient(oh, ow));
      }
    }
    to[i] = T(sum);
  }
};

inline Tensor max_pool2d_index(const Tensor& x, std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                               std::vector<int64_t> padding, std::vector<int64_t> dilation, bool ceil_mode) {
  const Window w(kernel_size, stride, padding, dilation);
  const Images in(x, "x");
  const int64_t rows = w.outputs(in.height, 0, ceil_mode), columns = w.outputs(in.width, 1, ceil_mode);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "the input of ", in.height, " x ", in.width, " is smaller than the window");
  Tensor index = new_images(x, sizes_of(x, rows, columns), ScalarType::Byte, in.channels_last);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    launch(x, index.numel(), PoolIndex<T>{read<T>(x), write<uint8_t>(index), in, w, rows, columns});
  });
  return index;
}

inline Tensor max_pool2d_index_backward(const Tensor& grad, const Tensor& index, std::vector<int64_t> input_size,
                                        std::vector<int64_t> kernel_size, std::vector<int64_t> stride,
                                        std::vector<int64_t> padding, std::vector<int64_t> dilation) {
  const Window w(kernel_size, stride, padding, dilation);
  const Images out(grad, "grad");
  check_index(grad, index, out, input_size);
  Tensor result = new_images(grad, input_size, grad.scalar_type(), out.channels_last);
  Images in(result, "the input");
  in.channels_last = out.channels_last;
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using Places = KeptPlaces<T>;
    launch(grad, result.numel(),
           PoolBackward<T, Places>{read<T>(grad), write<T>(result), in, out, w, Places{read<uint8_t>(index)}});
  });
  return result;
}

inline Tensor max_pool2d_input_backward(const Tensor& grad, const Tensor& x, std::vector<int64_t> kernel_size,
                                        std::vector<int64_t> stride, std::vector<int64_t> padding,
                                        std::vector<int64_t> dilation, bool ceil_mode) {
  const Window w(kernel_size, stride, padding, dilation);
  const Images in(x, "x");
  Images out(grad, "grad");
  check_pooled(grad, x, in, out, w, ceil_mode);
  out.channels_last = in.channels_last;
  Tensor result = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using Places = PlacesAgain<T>;
    launch(x, result.numel(),
           PoolBackward<T, Places>{read<T>(grad), write<T>(result), in, out, w, Places{read<T>(x), in}});
  });
  return result;
}

MONET_KERNEL(max_pool2d_index);
MONET_KERNEL(max_pool2d_index_backward);
MONET_KERNEL(max_pool2d_input_backward);

}  // namespace monet
