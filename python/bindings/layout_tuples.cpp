#include "layout_tuples.h"

#include <utility>

#include "arrays.h"
#include "metadata_fields.h"

namespace waybill::python {

nb::object intermediate_tuple(std::optional<DispatchIntermediates>&& values) {
  if (!values) return nb::none();
  return nb::make_tuple(numpy_array(std::move(values->tokens_to_dst_per_dispatch)),
                        numpy_array(std::move(values->seq_to_dst)),
                        numpy_array(std::move(values->num_received_seqs)));
}

nb::tuple layout_tuple(AttnLayout&& layout) {
  return nb::make_tuple(
      numpy_arrays(std::move(layout.cu_seqlens_q)), numpy_arrays(std::move(layout.cu_seqlens_kv)),
      numpy_array(std::move(layout.max_seqlen_q)), numpy_array(std::move(layout.max_seqlen_kv)),
      numpy_array(std::move(layout.num_local_seqs_recv)), numpy_arrays(std::move(layout.kv_begin)),
      numpy_arrays(std::move(layout.kv_len)));
}

nb::tuple e2e_tuple(E2eMetadata&& metadata) {
  return nb::make_tuple(fields_of(std::move(metadata.fwd_q)), fields_of(std::move(metadata.rev_q)),
                        fields_of(std::move(metadata.fwd_kv)),
                        fields_of(std::move(metadata.rev_kv)),
                        layout_tuple(std::move(metadata.attention)),
                        intermediate_tuple(std::move(metadata.q_intermediates)),
                        numpy_or_none(std::move(metadata.kv_dst_global_seq_id)));
}

nb::tuple raw_tuple(RawQkvDispatch&& raw) {
  return nb::make_tuple(
      numpy_array(std::move(raw.cp_seq_lens)), numpy_array(std::move(raw.num_cp_shards)),
      numpy_array(std::move(raw.cp_query_dst)), numpy_array(std::move(raw.kv.kv_to_q_mapping)),
      numpy_array(std::move(raw.kv.kv_to_q_rank)), numpy_array(std::move(raw.kv.kv_context_size)),
      numpy_array(std::move(raw.kv.q_to_num_kv_seq)),
      numpy_array(std::move(raw.kv.q_to_num_kv_token)));
}

}  // namespace waybill::python
