#pragma once

#include <nanobind/nanobind.h>

#include "waybill/routing/metadata.h"
#include "waybill/routing/validate.h"

namespace waybill::python {

namespace nb = nanobind;

/// The ten fields of Metadata in the order of its declaration: arrays or None, world_size, the
/// flag, and the totals as a list, one number (a slice) or None. The Python class is made of them.
using Fields = nb::tuple;

/// @throws InvalidArgument naming the field.
[[nodiscard]] Metadata metadata_from(const Fields& fields);

/// How a face takes the fields.
struct FieldsForm {
  bool capsules = false;          ///< DLPack capsules instead of numpy arrays
  bool callers_dst_rank = false;  ///< None stands there: the caller has it
  bool callers_seq_len = false;
};

[[nodiscard]] Fields fields_of(Metadata&& metadata, FieldsForm form = {});

/// (kind, table, field, rank, shard, copy, got, expected, text) of each.
[[nodiscard]] nb::list finding_tuples(const std::vector<Finding>& findings);

}  // namespace waybill::python
