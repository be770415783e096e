#include "waybill/experts/ep_all2all_layer.h"

#include <cstdlib>
#include <string>

#include "expert_checks.h"
#include "layer_state.h"
#include "waybill/core/error.h"

namespace waybill {

namespace {

/// What WAYBILL_COMBINE was when somebody first asked.
const std::string& combine_of_environment() {
  static const std::string way = [] {
    const char* const text = std::getenv("WAYBILL_COMBINE");
    return text == nullptr || *text == 0 ? "pull" : text;
  }();
  return way;
}

}  // namespace

bool pushes_combines_by_default() { return combine_of_environment() == "push"; }

void detail::check_combine_of_environment(const char* who) {
  const std::string& way = combine_of_environment();
  require(way == "push" || way == "pull", who, ": WAYBILL_COMBINE = \"", way,
          "\", expected push or pull");
}

EPAll2AllLayer::EPAll2AllLayer(const World& world, const EPConfig& config,
                               const EPLayerOptions& options)
    : state_(std::make_unique<detail::LayerState>(world, config, options)) {}
EPAll2AllLayer::EPAll2AllLayer(EPAll2AllLayer&& other) noexcept = default;
EPAll2AllLayer& EPAll2AllLayer::operator=(EPAll2AllLayer&& other) noexcept = default;
EPAll2AllLayer::~EPAll2AllLayer() = default;

EPDispatched EPAll2AllLayer::dispatch(const ExpertDispatchInput& input, Stream stream) {
  return state_->dispatch(input, stream);
}

EPDispatched EPAll2AllLayer::dispatch(const ExpertDispatchInput& input, const EPLayout& layout,
                                      Stream stream) {
  return state_->dispatch(input, layout, stream);
}

void EPAll2AllLayer::combine(const ExpertCombineInput& input, const EPLayout& layout,
                             Stream stream) {
  state_->combine(input, layout, stream);
}

void EPAll2AllLayer::weigh_gradients(const ExpertGradientInput& input, const EPLayout& layout,
                                     Stream stream) {
  state_->weigh_gradients(input, layout, stream);
}

void EPAll2AllLayer::copy_rows(const ConstTensorView& from, const TensorView& to,
                               const EPLayout& layout, Stream stream) {
  state_->copy_rows(from, to, layout, stream);
}

TensorView EPAll2AllLayer::combine_input(std::int64_t rows, Stream stream) {
  return state_->combine_input(rows, stream);
}

bool EPAll2AllLayer::combine_needs_gradients(const EPLayout& layout, bool mine, bool asks) {
  return state_->combine_needs_gradients(layout, mine, asks);
}

void EPAll2AllLayer::ep_barrier_all(Stream stream, bool intra_node_only) {
  state_->ep_barrier_all(stream, intra_node_only);
}

void EPAll2AllLayer::synchronize(Stream stream) { state_->synchronize(stream); }
ExpertOverflow EPAll2AllLayer::overflow() { return state_->overflow(); }
void EPAll2AllLayer::check_overflow() { state_->check_overflow(); }
void EPAll2AllLayer::finalize() { state_->finalize(); }

const EPConfig& EPAll2AllLayer::config() const noexcept { return state_->config(); }
const EPLayerOptions& EPAll2AllLayer::options() const noexcept { return state_->options(); }
const DispatchCombineContext& EPAll2AllLayer::context() const noexcept { return state_->context(); }
std::int64_t EPAll2AllLayer::output_rows() const noexcept {
  return state_->context().capacity_rows();
}

}  // namespace waybill
