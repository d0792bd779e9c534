// What an operator of ours does on a CUDA device, once it is known for tensors of certain sizes: new tensors, and
// launches of kernels. monetrun/ops/cuda/recorded.py finds it out; made here, a launch takes a fifth of the host's time.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

// cuLaunchKernel, whose declaration is in the CUDA toolkit, which users do not have.
using LaunchKernel = int (*)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, void* stream, void** parameters, void** extra);

constexpr int kInvalidContext = 201;
constexpr int kPlaceBits = 8;

// A kernel's arguments, by letters: O an address, as a tensor's number and behind it bytes into it (-1: null), l an
// integer, f and d the bits of a double, a whether the tensors whose bits are set lie at multiples of 16 bytes.
struct Launch {
  void* function;
  unsigned blocks, threads;
  std::string letters;
  std::vector<int64_t> arguments;

  // The driver's error, 0 for none.
  int make(LaunchKernel launch, void* stream, const std::vector<at::Tensor>& tensors) const {
    std::vector<int64_t> held(letters.size());
    std::vector<void*> parameters(letters.size());
    for (size_t i = 0; i < letters.size(); ++i) {
      put(letters[i], arguments[i], tensors, &held[i]);
      parameters[i] = &held[i];
    }
    return launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.data(), nullptr);
  }

 private:
  static int64_t address(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.data_ptr()); }

  static void put(char letter, int64_t argument, const std::vector<at::Tensor>& tensors, int64_t* to) {
    if (letter == 'O') {
      *to = argument < 0 ? 0 : address(tensors[argument & ((1 << kPlaceBits) - 1)]) + (argument >> kPlaceBits);
    } else if (letter == 'a') {
      int64_t bits = 0;
      for (size_t t = 0; t < tensors.size(); ++t) {
        if (argument >> t & 1) bits |= address(tensors[t]);
      }
      *to = bits % 16 == 0;
    } else if (letter == 'l') {
      *to = argument;
    } else {
      double number;
      std::memcpy(&number, &argument, sizeof number);
      const float rounded = static_cast<float>(number);
      letter == 'f' ? std::memcpy(to, &rounded, sizeof rounded) : std::memcpy(to, &number, sizeof number);
    }
  }
};

// All launches of one call of an operator. Its tensors are those given, then those made in this order.
struct Launches {
  at::Device device;
  LaunchKernel launch;
  std::vector<at::Tensor> like;  // of no memory: sizes, strides and dtypes
  std::vector<int64_t> given;    // the values that are given
  std::vector<Launch> launches;
  std::vector<int64_t> results;  // which of the tensors are the operator's results

  // Whether ``values`` are as they were thought to be; else the operator finds out for itself what to do.
  bool hold_for(const std::vector<c10::IValue>& values) const {
    if (device.has_index() && c10::impl::VirtualGuardImpl(device.type()).getDevice() != device) return false;
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& value = values[given[i]];
      if (!value.isTensor()) return false;
      const auto& tensor = value.toTensor();
      if (tensor.device() != device || tensor.scalar_type() != like[i].scalar_type() ||
          tensor.sizes() != like[i].sizes() || tensor.strides() != like[i].strides()) {
        return false;
      }
    }
    return true;
  }

  // The results; none where this thread has no context of the driver's yet, which torch's own launcher gives it.
  std::optional<std::vector<at::Tensor>> run(const std::vector<c10::IValue>& values, void* stream) const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(like.size());
    for (auto v : given) tensors.push_back(values[v].toTensor());
    for (size_t i = given.size(); i < like.size(); ++i) {
      tensors.push_back(at::empty_strided(like[i].sizes(), like[i].strides(), like[i].options().device(device)));
    }
    for (size_t i = 0; i < launches.size(); ++i) {
      const int error = launches[i].make(launch, stream, tensors);
      if (i == 0 && error == kInvalidContext) return std::nullopt;
      TORCH_CHECK(error == 0, "CUDA driver error ", error, " at a kernel's launch");
    }
    std::vector<at::Tensor> found;
    for (auto r : results) found.push_back(tensors[r]);
    return found;
  }
};

}  // namespace
