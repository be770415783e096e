#include "call_checks.h"

#include "row_sum.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

void check_number(const char* who, const char* name, std::size_t got, std::size_t expected) {
  require(got == expected, who, ": ", name, " has ", got, " tensors, expected ", expected,
          ", as many as the plan");
}

template <class Byte>
void check_rows(const char* who, const char* name, std::size_t t, const BasicTensorView<Byte>& view,
                std::int64_t hidden) {
  require(
      view.ndim() == 2 && view.strides.size() == 2 && view.shape[0] >= 0 && view.shape[1] == hidden,
      who, ": ", name, "[", t, "] has shape ", to_string(view.shape), ", expected [rows, ", hidden,
      "]");
  require(view.strides[1] == 1 || hidden <= 1, who, ": ", name, "[", t, "] has strides ",
          to_string(view.strides), ", expected adjacent elements in a row");
  require(view.data != nullptr || view.shape[0] == 0 || hidden == 0, who, ": ", name, "[", t,
          "] is null");
}

}  // namespace

void check_inputs(const char* who, const SequencePlan& plan,
                  std::span<const ConstTensorView> inputs) {
  check_number(who, "tensors", inputs.size(), plan.tensors.size());
  const bool sends = plan.operation == SequenceOperation::dispatch;
  for (std::size_t t = 0; t < inputs.size(); ++t) {
    check_rows(who, "tensors", t, inputs[t], plan.tensors[t].hidden);
    require(inputs[t].dtype == plan.tensors[t].dtype, who, ": tensors[", t, "] is ",
            inputs[t].dtype, ", expected ", plan.tensors[t].dtype, ", as in the plan");
    const std::int64_t rows = sends ? plan.own_rows[t] : plan.window_rows[t];
    require(inputs[t].shape[0] >= rows, who, ": tensors[", t, "] has ", inputs[t].shape[0],
            " rows, expected at least ", rows);
  }
}

void check_outputs(const char* who, const SequencePlan& plan, std::span<const TensorView> outputs) {
  check_number(who, "outputs", outputs.size(), plan.tensors.size());
  for (std::size_t t = 0; t < outputs.size(); ++t) {
    check_rows(who, "outputs", t, outputs[t], plan.tensors[t].hidden);
    require(outputs[t].shape[0] >= plan.own_rows[t], who, ": outputs[", t, "] has ",
            outputs[t].shape[0], " rows, expected at least ", plan.own_rows[t]);
    require(can_sum(plan.tensors[t].dtype, outputs[t].dtype), who, ": outputs[", t, "] is ",
            outputs[t].dtype, ", expected ", plan.tensors[t].dtype,
            " as the gradients, or float32 for 16-bit ones");
    require(outputs[t].dtype == outputs[0].dtype, who, ": outputs are ", outputs[0].dtype, " and ",
            outputs[t].dtype, ", expected one dtype");
  }
}

}  // namespace waybill::detail
