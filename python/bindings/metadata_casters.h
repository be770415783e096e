#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/validate.h"

// Metadata, layouts and dispatches cross as tuples, of which the package makes its own classes.

namespace waybill::python {

namespace nb = nanobind;

/// The ten fields of Metadata in the order of its declaration: arrays or None, world_size, the
/// flag, and the totals as a list, one number (a slice) or None.
/// @throws InvalidArgument naming the field.
[[nodiscard]] Metadata metadata_from(const nb::tuple& fields);
[[nodiscard]] nb::tuple to_tuple(Metadata&& metadata);

/// @param capsules DLPack capsules instead of numpy arrays
/// @param callers_dst_rank None stands there: the caller has it
/// @param callers_seq_len the same
[[nodiscard]] nb::tuple fields_of(Metadata&& metadata, bool capsules, bool callers_dst_rank = false,
                                  bool callers_seq_len = false);

/// (kind, table, field, rank, shard, copy, got, expected, text) of each.
[[nodiscard]] nb::list finding_tuples(const std::vector<Finding>& findings);

/// (fwd, rev, kv_dst_global_seq_id or None)
[[nodiscard]] nb::tuple to_tuple(KvMetadata&& metadata);

/// (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, num_local_seqs_recv, kv_row,
/// kv_len); lists of arrays where AttnLayout has vectors.
[[nodiscard]] nb::tuple to_tuple(AttnLayout&& layout);

/// (fwd_q, rev_q, fwd_kv, rev_kv, layout, q intermediates or None, kv_dst_global_seq_id or None)
[[nodiscard]] nb::tuple to_tuple(E2eMetadata&& metadata);

/// The eight arrays of a plan in dense form, in the order in which DistCA returns them.
[[nodiscard]] nb::tuple to_tuple(RawQkvDispatch&& raw);
/// (eight arrays, seq_lens, plan)
[[nodiscard]] nb::tuple to_tuple(RawQkvDispatchWithLens&& result);
/// (metadata, eight arrays, seq_lens, plan)
[[nodiscard]] nb::tuple to_tuple(QkvDispatch&& result);

template <class Value, class... Types>
concept OneOf = (std::same_as<Value, Types> || ...);

}  // namespace waybill::python

/// A result becomes to_tuple() of it. Wrong fields of Metadata throw when the function is
/// called, so that the error names them.
template <waybill::python::OneOf<waybill::Metadata, waybill::KvMetadata, waybill::AttnLayout,
                                 waybill::E2eMetadata, waybill::RawQkvDispatch,
                                 waybill::RawQkvDispatchWithLens, waybill::QkvDispatch>
              Value>
struct nanobind::detail::type_caster<Value> {
  static constexpr auto Name = const_name("tuple");
  template <class T>
  using Cast = Value;

  bool from_python(handle source, std::uint32_t /*flags*/, cleanup_list* /*cleanup*/) noexcept {
    if (!isinstance<nanobind::tuple>(source)) return false;
    fields = borrow<nanobind::tuple>(source);
    return true;
  }

  explicit operator Value() const { return waybill::python::metadata_from(fields); }

  static handle from_cpp(Value&& value, rv_policy /*policy*/, cleanup_list* /*cleanup*/) noexcept
      try {
    return waybill::python::to_tuple(std::move(value)).release();
  } catch (python_error& error) {
    error.restore();
    return {};
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return {};
  }

  nanobind::tuple fields;
};
