// Max pooling that keeps one byte for each window, or nothing. The gradient is gathered: each element of the input
// reads the windows that cover it, in the order of the output, so that runs are identical.
//
// These kernels are bound by arithmetic, not by memory: within an image all indices have 32 bits, and divisions are by
// numbers that the host has inverted.

#pragma once

#include "elements_cuda.cuh"
#include "window.hpp"

namespace monet {

// Division of numbers from 0 to 2^31 - 1, as a product with the reciprocal (Granlund and Montgomery, PLDI 1994).
struct Divider {
  uint32_t magic;
  int shift;

  __device__ explicit Divider(int64_t packed)  // by ops/cuda/pooling.py
      : magic(static_cast<uint32_t>(packed >> 8)), shift(static_cast<int>(packed & 0xff)) {}
  __device__ int operator()(int n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * magic) >> 32);
    return static_cast<int>((high + static_cast<uint32_t>(n)) >> shift);
  }
};

// One image's sizes, contiguous or channels-last.
struct Image {
  int channels, height, width;
  bool channels_last;

  __device__ int plane() const { return height * width; }
  __device__ int elements() const { return channels * height * width; }
};

// Where an element of an image lies.
struct Place {
  int channel, row, column;
};

// inner and outer divide by the sizes of the two innermost dimensions.
__device__ inline Place place_of(int i, const Image& of, const Divider& inner, const Divider& outer) {
  Place at;
  const int by_inner = inner(i), by_outer = outer(by_inner);
  if (of.channels_last) {
    at.channel = i - by_inner * of.channels;
    at.column = by_inner - by_outer * of.width;
    at.row = by_outer;
  } else {
    at.column = i - by_inner * of.width;
    at.row = by_inner - by_outer * of.height;
    at.channel = by_outer;
  }
  return at;
}

// One channel of one image: the element at (row, column) is data[(row * width + column) * step].
template <class E>
struct Plane {
  const E* data;
  int height, width, step;

  __device__ Plane(const E* all, const Image& of, int64_t image, int channel)
      : data(all + image * of.elements() + (of.channels_last ? channel : channel * of.plane())),
        height(of.height),
        width(of.width),
        step(of.channels_last ? of.channels : 1) {}
  __device__ E operator()(int row, int column) const { return data[(row * width + column) * step]; }
};

// The place of the largest element of the window that starts at (top, left): as ATen picks it.
__device__ inline int largest(const Plane<T>& x, const WindowOf<int>& w, int top, int left) {
  const int last_row = w.last(top, 0, x.height), last_column = w.last(left, 1, x.width);
  const int first_row = w.first(top, 0), first_column = w.first(left, 1);
  int place = first_row * w.size[1] + first_column;
  bool any = false;  // the first element is the largest so far, whatever it is
  A best = 0;
  for (int i = first_row; i < last_row; ++i) {
    for (int j = first_column; j < last_column; ++j) {
      const A value = static_cast<A>(x(top + i * w.dilation[0], left + j * w.dilation[1]));
      if (!any || value > best || value != value) {
        best = value;
        any = true;
        place = i * w.size[1] + j;
      }
    }
  }
  return place;
}

// Whether `largest` gives this place, which has this value: no NaN follows a NaN; any other value is above all before
// it, and no value after it is above it.
__device__ inline bool is_largest(const Plane<T>& x, const WindowOf<int>& w, int top, int left, int place, A value) {
  const int last_row = w.last(top, 0, x.height), last_column = w.last(left, 1, x.width);
  const bool nan = value != value;
  for (int i = w.first(top, 0); i < last_row; ++i) {
    for (int j = w.first(left, 1); j < last_column; ++j) {
      const int other_place = i * w.size[1] + j;
      if (other_place == place) continue;
      const A other = static_cast<A>(x(top + i * w.dilation[0], left + j * w.dilation[1]));
      const bool above = other_place < place ? other >= value : other > value;
      if (nan ? other_place > place && other != other : above || other != other) return false;
    }
  }
  return true;
}

// Calls body(image, i) for all elements of all images: a block takes kRun * blockDim.x of one image's at a time.
constexpr int kRun = 4;  // as ops/cuda/pooling.py has it

template <class Body>
__device__ inline void for_each_element(int64_t images, int elements, Body body) {
  const int run = kRun * static_cast<int>(blockDim.x);
  const int64_t runs = (elements + run - 1) / run;
  for (int64_t block = blockIdx.x; block < images * runs; block += gridDim.x) {
    const int64_t image = block / runs;
    int i = static_cast<int>(block - image * runs) * run + static_cast<int>(threadIdx.x);
    for (int k = 0; k < kRun && i < elements; ++k, i += static_cast<int>(blockDim.x)) body(image, i);
  }
}

// What the kernels are told of a pooling.
struct Pooling {
  WindowOf<int> window;
  Image in, out;

  __device__ Pooling(int64_t channels, int64_t height, int64_t width, int64_t channels_last, int64_t rows,
                     int64_t columns, int64_t size_h, int64_t size_w, int64_t stride_h, int64_t stride_w,
                     int64_t padding_h, int64_t padding_w, int64_t dilation_h, int64_t dilation_w)
      : window{{int(size_h), int(size_w)},
               {int(stride_h), int(stride_w)},
               {int(padding_h), int(padding_w)},
               {int(dilation_h), int(dilation_w)}},
        in{int(channels), int(height), int(width), channels_last != 0},
        out{int(channels), int(rows), int(columns), channels_last != 0} {}
};

extern "C" __global__ void max_pool2d_index(const T* x, uint8_t* index, int64_t images, int64_t channels,
                                            int64_t height, int64_t width, int64_t channels_last, int64_t rows,
                                            int64_t columns, int64_t size_h, int64_t size_w, int64_t stride_h,
                                            int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                            int64_t dilation_h, int64_t dilation_w, int64_t inner, int64_t outer) {
  const Pooling p(channels, height, width, channels_last, rows, columns, size_h, size_w, stride_h, stride_w, padding_h,
                  padding_w, dilation_h, dilation_w);
  const Divider by_inner(inner), by_outer(outer);
  const WindowOf<int>& w = p.window;
  for_each_element(images, p.out.elements(), [&](int64_t image, int o) {
    const Place at = place_of(o, p.out, by_inner, by_outer);
    const int place = largest(Plane<T>(x, p.in, image, at.channel), w, w.start(at.row, 0), w.start(at.column, 1));
    index[image * p.out.elements() + o] = static_cast<uint8_t>(place);
  });
}

// The outputs whose windows may cover the element at `at` along one dimension: from `first` to `last`.
struct Outputs {
  int first, last;

  __device__ Outputs(int at, const WindowOf<int>& w, int d, int outputs, const Divider& stride) {
    const int reach = at + w.padding[d], before = reach - w.dilation[d] * (w.size[d] - 1);
    first = before <= 0 ? 0 : stride(before + w.stride[d] - 1);
    last = stride(reach);
    if (last >= outputs) last = outputs - 1;
  }
};

// The gradient of the element at `at`; picks(output row, its column, place) tells whether that output has picked it.
template <class Picks>
__device__ inline T gathered(const Plane<T>& grad, const Place& at, const WindowOf<int>& w, const Divider& stride_h,
                             const Divider& stride_w, Picks picks) {
  const Outputs rows(at.row, w, 0, grad.height, stride_h), columns(at.column, w, 1, grad.width, stride_w);
  A sum = 0;
  for (int oh = rows.first; oh <= rows.last; ++oh) {
    const int kh = w.place(at.row - w.start(oh, 0), 0);
    if (kh < 0) continue;
    for (int ow = columns.first; ow <= columns.last; ++ow) {
      const int kw = w.place(at.column - w.start(ow, 1), 1);
      if (kw >= 0 && picks(oh, ow, kh * w.size[1] + kw)) sum += static_cast<A>(grad(oh, ow));
    }
  }
  return T(sum);
}

// The gradients of all elements; picks_of(image, at) gives `picks` for the element at `at`.
template <class PicksOf>
__device__ inline void gather(const Pooling& p, const T* grad, T* to, int64_t images, int64_t inner, int64_t outer,
                              int64_t by_stride_h, int64_t by_stride_w, PicksOf picks_of) {
  const Divider by_inner(inner), by_outer(outer), stride_h(by_stride_h), stride_w(by_stride_w);
  for_each_element(images, p.in.elements(), [&](int64_t image, int i) {
    const Place at = place_of(i, p.in, by_inner, by_outer);
    const Plane<T> gradient(grad, p.out, image, at.channel);
    to[image * p.in.elements() + i] = gathered(gradient, at, p.window, stride_h, stride_w, picks_of(image, at));
  });
}

extern "C" __global__ void max_pool2d_index_backward(const T* grad, const uint8_t* index, T* to, int64_t images,
                                                     int64_t channels, int64_t height, int64_t width,
                                                     int64_t channels_last, int64_t rows, int64_t columns,
                                                     int64_t size_h, int64_t size_w, int64_t stride_h,
                                                     int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                                     int64_t dilation_h, int64_t dilation_w, int64_t inner,
                                                     int64_t outer, int64_t by_stride_h, int64_t by_stride_w) {
  const Pooling p(channels, height, width, channels_last, rows, columns, size_h, size_w, stride_h, stride_w, padding_h,
                  padding_w, dilation_h, dilation_w);
  gather(p, grad, to, images, inner, outer, by_stride_h, by_stride_w, [&](int64_t image, const Place& at) {
    const Plane<uint8_t> picked(index, p.out, image, at.channel);
    return [picked](int oh, int ow, int place) { return picked(oh, ow) == place; };
  });
}

extern "C" __global__ void max_pool2d_input_backward(const T* grad, const T* x, T* to, int64_t images,
                                                     int64_t channels, int64_t height, int64_t width,
                                                     int64_t channels_last, int64_t rows, int64_t columns,
                                                     int64_t size_h, int64_t size_w, int64_t stride_h,
                                                     int64_t stride_w, int64_t padding_h, int64_t padding_w,
                                                     int64_t dilation_h, int64_t dilation_w, int64_t inner,
                                                     int64_t outer, int64_t by_stride_h, int64_t by_stride_w) {
  const Pooling p(channels, height, width, channels_last, rows, columns, size_h, size_w, stride_h, stride_w, padding_h,
                  padding_w, dilation_h, dilation_w);
  const WindowOf<int>& w = p.window;
  gather(p, grad, to, images, inner, outer, by_stride_h, by_stride_w, [&](int64_t image, const Place& at) {
    const Plane<T> plane(x, p.in, image, at.channel);
    const A value = static_cast<A>(plane(at.row, at.column));
    return [=](int oh, int ow, int place) {
      return is_largest(plane, w, w.start(oh, 0), w.start(ow, 1), place, value);
    };
  });
}

}  // namespace monet
