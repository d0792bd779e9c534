// Max pooling that keeps one byte for each window, or nothing. The gradient is gathered: each element of the input
// reads the windows that cover it, in the order of the output, so that runs are identical.

#pragma once

#include "elements_cuda.cuh"
#include "window.hpp"

namespace monet {

// The sizes of images, contiguous or channels-last.
struct Images {
  int64_t channels, height, width;
  bool channels_last;
};

// Where an element of images lies: its image, channel, row and column.
struct Place {
  int64_t image, channel, row, column;
};

__device__ inline Place place_of(int64_t i, const Images& of) {
  Place at;
  if (of.channels_last) {
    at.channel = i % of.channels;
    i /= of.channels;
  }
  at.column = i % of.width;
  i /= of.width;
  at.row = i % of.height;
  i /= of.height;
  if (!of.channels_last) {
    at.channel = i % of.channels;
    i /= of.channels;
  }
  at.image = i;
  return at;
}

// One channel of one image: the element at (row, column) is data[(row * width + column) * step].
template <class E>
struct Plane {
  const E* data;
  int64_t height, width, step;

  __device__ Plane(const E* all, const Images& of, const Place& at)
      : data(all + at.image * of.channels * of.height * of.width +
             (of.channels_last ? at.channel : at.channel * of.height * of.width)),
        height(of.height),
        width(of.width),
        step(of.channels_last ? of.channels : 1) {}
  __device__ E operator()(int64_t row, int64_t column) const { return data[(row * width + column) * step]; }
};

// The place of the largest element of the window that starts at (top, left): as ATen picks it.
__device__ inline int largest(const Plane<T>& x, const Window& w, int64_t top, int64_t left) {
  const int64_t last_row = w.last(top, 0, x.height), last_column = w.last(left, 1, x.width);
  const int64_t first_row = w.first(top, 0), first_column = w.first(left, 1);
  int64_t place = first_row * w.size[1] + first_column;
  bool any = false;  // the first element is the largest so far, whatever it is
  A best = 0;
  for (int64_t i = first_row; i < last_row; ++i) {
    for (int64_t j = first_column; j < last_column; ++j) {
      const A value = static_cast<A>(x(top + i * w.dilation[0], left + j * w.dilation[1]));
      if (!any || value > best || value != value) {
        best = value;
        any = true;
        place = i * w.size[1] + j;
      }
    }
  }
  return static_cast<int>(place);
}

extern "C" __global__ void max_pool2d_index(const T* x, uint8_t* index, int64_t count, int64_t channels,
                                            int64_t height, int64_t width, int64_t channels_last, int64_t rows,
                                            int64_t columns, int64_t size_h, int64_t size_w, int64_t stride_h,
                                            int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                            int64_t dilation_h, int64_t dilation_w) {
  const Window w{{size_h, size_w}, {stride_h, stride_w}, {padding_h, padding_w}, {dilation_h, dilation_w}};
  const Images in{channels, height, width, channels_last != 0}, out{channels, rows, columns, channels_last != 0};
  for (int64_t o = first_index(); o < count; o += index_step()) {
    const Place at = place_of(o, out);
    index[o] = static_cast<uint8_t>(largest(Plane<T>(x, in, at), w, w.start(at.row, 0), w.start(at.column, 1)));
  }
}

// The output whose window has the element at `at` in its place k, along one dimension; -1 where there is none.
__device__ inline int64_t output_of(int64_t at, int64_t k, const Window& w, int d, int64_t outputs) {
  const int64_t start = at + w.padding[d] - k * w.dilation[d];
  return start >= 0 && start % w.stride[d] == 0 && start / w.stride[d] < outputs ? start / w.stride[d] : -1;
}

// Element i of the input's gradient; place_at(at, row, column) is the place that an output of at's plane has picked.
template <class PlaceAt>
__device__ inline T gathered(int64_t i, const T* grad, const Images& in, const Images& out, const Window& w,
                             PlaceAt place_at) {
  const Place at = place_of(i, in);
  const Plane<T> gradient(grad, out, at);
  A sum = 0;
  for (int64_t kh = w.size[0] - 1; kh >= 0; --kh) {
    const int64_t oh = output_of(at.row, kh, w, 0, out.height);
    if (oh < 0) continue;
    for (int64_t kw = w.size[1] - 1; kw >= 0; --kw) {
      const int64_t ow = output_of(at.column, kw, w, 1, out.width);
      if (ow >= 0 && place_at(at, oh, ow) == kh * w.size[1] + kw) sum += static_cast<A>(gradient(oh, ow));
    }
  }
  return T(sum);
}

extern "C" __global__ void max_pool2d_index_backward(const T* grad, const uint8_t* index, T* to, int64_t count,
                                                     int64_t channels, int64_t height, int64_t width,
                                                     int64_t channels_last, int64_t rows, int64_t columns,
                                                     int64_t size_h, int64_t size_w, int64_t stride_h,
                                                     int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                                     int64_t dilation_h, int64_t dilation_w) {
  const Window w{{size_h, size_w}, {stride_h, stride_w}, {padding_h, padding_w}, {dilation_h, dilation_w}};
  const Images in{channels, height, width, channels_last != 0}, out{channels, rows, columns, channels_last != 0};
  for (int64_t i = first_index(); i < count; i += index_step())
    to[i] = gathered(i, grad, in, out, w, [&](const Place& at, int64_t oh, int64_t ow) {
      return static_cast<int>(Plane<uint8_t>(index, out, at)(oh, ow));
    });
}

extern "C" __global__ void max_pool2d_input_backward(const T* grad, const T* x, T* to, int64_t count,
                                                     int64_t channels, int64_t height, int64_t width,
                                                     int64_t channels_last, int64_t rows, int64_t columns,
                                                     int64_t size_h, int64_t size_w, int64_t stride_h,
                                                     int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                                     int64_t dilation_h, int64_t dilation_w) {
  const Window w{{size_h, size_w}, {stride_h, stride_w}, {padding_h, padding_w}, {dilation_h, dilation_w}};
  const Images in{channels, height, width, channels_last != 0}, out{channels, rows, columns, channels_last != 0};
  for (int64_t i = first_index(); i < count; i += index_step())
    to[i] = gathered(i, grad, in, out, w, [&](const Place& at, int64_t oh, int64_t ow) {
      return largest(Plane<T>(x, in, at), w, w.start(oh, 0), w.start(ow, 1));
    });
}

}  // namespace monet
