#pragma once

#include <cstdint>
#include <memory>

#include "experts/expert_executor.h"
#include "layer_meetings.h"
#include "runtime/abort_state.h"
#include "runtime/capture_log.h"
#include "waybill/experts/ep_all2all_layer.h"

namespace waybill::detail {

/// What an EPAll2AllLayer is. Functions of the same names say what these do.
class LayerState {
 public:
  LayerState(const World& world, const EPConfig& config, const EPLayerOptions& options);
  ~LayerState();
  LayerState(const LayerState&) = delete;
  LayerState& operator=(const LayerState&) = delete;

  EPDispatched dispatch(const ExpertDispatchInput& input, Stream stream);
  EPDispatched dispatch(const ExpertDispatchInput& input, const EPLayout& layout, Stream stream);
  void combine(const ExpertCombineInput& input, const EPLayout& layout, Stream stream);
  void weigh_gradients(const ExpertGradientInput& input, const EPLayout& layout, Stream stream);
  void copy_rows(const ConstTensorView& from, const TensorView& to, const EPLayout& layout,
                 Stream stream);
  [[nodiscard]] TensorView combine_input(std::int64_t rows, Stream stream);
  [[nodiscard]] bool combine_needs_gradients(const EPLayout& layout, bool mine, bool asks);
  void ep_barrier_all(Stream stream, bool intra_node_only);
  void synchronize(Stream stream);
  [[nodiscard]] ExpertOverflow overflow();
  void check_overflow();
  void finalize();

  [[nodiscard]] const EPConfig& config() const noexcept { return config_; }
  [[nodiscard]] const EPLayerOptions& options() const noexcept { return options_; }
  [[nodiscard]] const DispatchCombineContext& context() const noexcept { return context_; }

 private:
  [[nodiscard]] static DispatchCombineContext make_context(const World& world,
                                                           const EPConfig& config,
                                                           const EPLayerOptions& options);
  [[nodiscard]] ExpertCall next_call(const char* operation, std::uint64_t number,
                                     const Stream& stream,
                                     const CallFingerprint& fingerprint) const;
  [[nodiscard]] CallFingerprint fingerprint() const;
  [[nodiscard]] std::uint64_t realign(const ExpertCall& call);
  [[nodiscard]] bool may_take_second_place(const Stream& stream) const;
  EPDispatched finish_dispatch(const ExpertCall& call, const ExpertDispatchInput& input,
                               std::shared_ptr<ExpertTables> begun, std::uint32_t routing);
  void grow_for(const ExpertTables& tables, const Stream& stream);
  [[nodiscard]] bool goes_alike(const EPLayout& layout) const;
  void check_rows(const ExpertCombineInput& input, const EPLayout& layout) const;
  void check_place(const ConstTensorView& rows) const;

  World world_;
  EPConfig config_;
  EPLayerOptions options_;
  std::uint64_t id_;
  DispatchCombineContext context_;
  std::unique_ptr<LayerMeetings> meetings_;
  std::unique_ptr<ExpertExecutor> executor_;
  std::uint64_t epoch_ = 0;  ///< of the last call
  std::uint64_t num_dispatches_ = 0;
  std::uint64_t num_combines_ = 0;
  std::uint64_t num_places_ = 0;        ///< of combine_input for the next combines, not yet used
  bool ends_with_combine_ = false;      ///< the last call was one
  bool has_recorded_ = false;           ///< combines, which graphs may run at any time
  std::uint64_t dispatch_capture_ = 0;  ///< recording of the last dispatch
  CaptureLog captured_dispatches_;
  CaptureLog captured_combines_;
  AbortState abort_state_{"layer", &world_.transport()};
};

}  // namespace waybill::detail
