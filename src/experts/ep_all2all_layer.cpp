#include "waybill/experts/ep_all2all_layer.h"

#include <cstdlib>
#include <string_view>

#include "layer_state.h"
#include "waybill/core/error.h"

namespace waybill {

bool pushes_combines_by_default() {
  static const bool pushes = [] {
    const char* const way = std::getenv("WAYBILL_COMBINE");
    const std::string_view text = way == nullptr || *way == 0 ? "pull" : way;
    require(text == "push" || text == "pull", "WAYBILL_COMBINE = \"", text,
            "\", expected push or pull");
    return text == "push";
  }();
  return pushes;
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
