// Runs a module of a schedule without Python: a list of calls of torch's operators on numbered values, each of which is
// freed after its last reader, as in the code that fx generates. monetrun/capture/program.py makes the list.

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device_peaks.hpp"
#include "launches.hpp"

namespace {

using c10::IValue;
using Tensors = c10::List<std::optional<at::Tensor>>;

// Where an argument comes from. A row of numbers describes it: {} is the constant, {v} the value v, {kList, v, ...} a
// list of values (kNone: none), {kEmpty} a list without elements.
constexpr int64_t kNone = -1, kList = -2, kEmpty = -3;

struct Source {
  std::vector<int64_t> row;
  IValue constant;

  bool is_constant() const { return row.empty(); }
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Source> sources;
  std::vector<int64_t> results;  // the values that it writes; kNone: nobody reads it
  std::vector<int64_t> freed;    // after it
  bool gives_list;
  std::optional<Launches> launches;  // what it does, where that is known
};

c10::TypePtr element_type(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  auto list = type->cast<c10::ListType>();
  TORCH_CHECK(list, "expected a list, the schema has ", type->str());
  return list->getElementType();
}

IValue empty_list(const c10::TypePtr& type) {
  auto element = element_type(type);
  if (element->kind() == c10::TypeKind::SymIntType) element = c10::IntType::get();
  return c10::impl::GenericList(element);
}

IValue list_of(const Source& source, const c10::TypePtr& type, const std::vector<IValue>& values) {
  const bool optional = element_type(type)->kind() == c10::TypeKind::OptionalType;
  Tensors some;
  c10::List<at::Tensor> all;
  for (size_t i = 1; i < source.row.size(); ++i) {
    const auto v = source.row[i];
    if (optional) {
      some.push_back(v == kNone ? std::nullopt : std::optional<at::Tensor>(values[v].toTensor()));
    } else {
      all.push_back(values[v].toTensor());
    }
  }
  return optional ? IValue(std::move(some)) : IValue(std::move(all));
}

// What Python's binding makes of a value where the schema has a tensor: of None an undefined one, and of a number one
// that does not decide the result's type.
IValue as_argument(const IValue& value, const c10::TypePtr& type) {
  if (value.isTensor() || type->kind() != c10::TypeKind::TensorType) return value;
  if (value.isNone()) return at::Tensor();
  auto number = c10::scalar_to_tensor(value.toScalar());
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

// The values of one run: first its arguments, which belong to nobody else, since the caller drops its references.
struct Values : torch::CustomClassHolder {
  Values(Tensors given, int64_t count, int64_t stream) : stream(reinterpret_cast<void*>(stream)), values(count) {
    for (size_t i = 0; i < given.size(); ++i) values[i] = given.extract(i);
  }

  Tensors read(const std::vector<int64_t>& wanted) const {
    Tensors found;
    found.reserve(wanted.size());
    for (auto v : wanted) {
      found.push_back(values[v].isNone() ? std::nullopt : std::optional<at::Tensor>(values[v].toTensor()));
    }
    return found;
  }

  void write(const std::vector<int64_t>& where, const Tensors& given) {
    for (size_t i = 0; i < where.size(); ++i) {
      if (where[i] != kNone) values[where[i]] = given.get(i);
    }
  }

  void free(const std::vector<int64_t>& unread) {
    for (auto v : unread) values[v] = IValue();
  }

  void* const stream;  // the current one, where the program has launches
  std::vector<IValue> values;
};

struct Program : torch::CustomClassHolder {
  void add(const std::string& name, const std::string& overload, const IValue& constants,
           const std::vector<std::vector<int64_t>>& rows, std::vector<int64_t> results, std::vector<int64_t> freed) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& schema = op.schema();
    const auto given = constants.toTupleRef().elements().vec();
    TORCH_CHECK(rows.size() == schema.arguments().size() && given.size() == rows.size(), name, ": expected ",
                schema.arguments().size(), " arguments, got ", rows.size());
    std::vector<Source> sources;
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto& type = schema.arguments()[i].type();
      const bool empty = rows[i].size() == 1 && rows[i][0] == kEmpty;
      sources.push_back(empty ? Source{{}, empty_list(type)} : Source{rows[i], as_argument(given[i], type)});
    }
    const auto& returns = schema.returns();
    const bool gives_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
    TORCH_CHECK(gives_list || results.size() == returns.size(), name, ": expected ", returns.size(), " results");
    calls_.push_back({op, std::move(sources), std::move(results), std::move(freed), gives_list, std::nullopt});
  }

  // What the call that was added last does on ``device``. ``launches`` are tuples of a Launch's members in their order.
  void launches(const std::string& device, int64_t launch, std::vector<at::Tensor> like, std::vector<int64_t> given,
                const IValue& launches, std::vector<int64_t> results) {
    Launches found{at::Device(device), reinterpret_cast<LaunchKernel>(launch), std::move(like), std::move(given), {},
                   std::move(results)};
    for (const auto& value : launches.toTupleRef().elements()) {
      const auto& one = value.toTupleRef().elements();
      found.launches.push_back({reinterpret_cast<void*>(one[0].toInt()), static_cast<unsigned>(one[1].toInt()),
                                static_cast<unsigned>(one[2].toInt()), one[3].toStringRef(), one[4].toIntVector()});
    }
    calls_.back().launches = std::move(found);
  }

  // Make the calls from ``begin`` to before ``end``.
  void run(const c10::intrusive_ptr<Values>& of_run, int64_t begin, int64_t end) const {
    at::AutoDispatchBelowAutograd below;  // autograd has recorded the whole module as one function
    auto& values = of_run->values;
    torch::jit::Stack stack;
    try {
      for (auto call = calls_.begin() + begin; call != calls_.begin() + end; ++call) {
        if (!launched(*call, *of_run, stack)) {
          push(*call, values, stack);
          call->op.callBoxed(stack);
        }
        take(*call, values, stack);
        stack.clear();
        of_run->free(call->freed);
      }
    } catch (...) {
      values.clear();  // an error's traceback may live on
      throw;
    }
  }

 private:
  static bool launched(const Call& call, const Values& of_run, torch::jit::Stack& stack) {
    if (!call.launches || !call.launches->hold_for(of_run.values)) return false;
    RECORD_FUNCTION(call.op.schema().name(), c10::ArrayRef<const IValue>{});
    auto results = call.launches->run(of_run.values, of_run.stream);
    if (!results) return false;
    for (auto& result : *results) stack.emplace_back(std::move(result));
    return true;
  }

  static void push(const Call& call, const std::vector<IValue>& values, torch::jit::Stack& stack) {
    for (size_t i = 0; i < call.sources.size(); ++i) {
      const auto& source = call.sources[i];
      if (source.is_constant()) {
        stack.push_back(source.constant);
      } else if (source.row[0] == kList) {
        stack.push_back(list_of(source, call.op.schema().arguments()[i].type(), values));
      } else {
        stack.push_back(as_argument(values[source.row[0]], call.op.schema().arguments()[i].type()));
      }
    }
  }

  static void take(const Call& call, std::vector<IValue>& values, torch::jit::Stack& stack) {
    if (call.gives_list) {
      auto list = stack.at(0).toTensorList();
      for (size_t i = 0; i < call.results.size(); ++i) {
        if (call.results[i] != kNone) values[call.results[i]] = list.get(i);
      }
      return;
    }
    for (size_t i = 0; i < call.results.size(); ++i) {
      if (call.results[i] != kNone) values[call.results[i]] = std::move(stack[i]);
    }
  }

  std::vector<Call> calls_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(monetrun, m) {
  m.class_<Values>("Values")
      .def(torch::init<Tensors, int64_t, int64_t>())
      .def("read", &Values::read)
      .def("write", &Values::write)
      .def("free", &Values::free);
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("add", &Program::add)
      .def("launches", &Program::launches)
      .def("run", &Program::run);
}
