#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/json/plan_json.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/validate.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

ValidateOptions validate_options(const nb::tuple& values) {
  return {nb::cast<std::int64_t>(values[0]), nb::cast<std::int64_t>(values[1]),
          nb::cast<std::int64_t>(values[2])};
}

/// The fields of an AttnLayout, in its order.
using LayoutArg =
    std::tuple<std::vector<IndexArray>, std::vector<IndexArray>, IndexArray, IndexArray, IndexArray,
               std::vector<IndexArray>, std::vector<IndexArray>>;

void bind_validate(nb::module_& m) {
  m.def(
      "validate_metadata",
      [](const Fields& fields, const nb::tuple& options) {
        const Metadata metadata = metadata_from(fields);
        const ValidateOptions o = validate_options(options);
        return finding_tuples(unlocked([&] { return validate(metadata, o); }));
      },
      "fields"_a, "options"_a);
  m.def(
      "validate_pair",
      [](const Fields& fwd, const Fields& rev, const nb::tuple& options) {
        const Metadata forward = metadata_from(fwd);
        const Metadata reverse = metadata_from(rev);
        const ValidateOptions o = validate_options(options);
        return finding_tuples(unlocked([&] { return validate(forward, reverse, o); }));
      },
      "fwd"_a, "rev"_a, "options"_a);
  m.def(
      "validate_plan",
      [](const QkvPlan& plan, const nb::tuple& options) {
        const ValidateOptions o = validate_options(options);
        return finding_tuples(unlocked([&] { return validate(plan, o); }));
      },
      "plan"_a, "options"_a);
  m.def(
      "validate_all",
      [](const QkvPlan& plan, const Fields& fwd_q, const Fields& rev_q, const Fields& fwd_kv,
         const Fields& rev_kv, LayoutArg layout, const nb::tuple& options) {
        const E2eMetadata metadata{metadata_from(fwd_q),
                                   metadata_from(rev_q),
                                   metadata_from(fwd_kv),
                                   metadata_from(rev_kv),
                                   std::make_from_tuple<AttnLayout>(std::move(layout)),
                                   std::nullopt,
                                   std::nullopt};
        const ValidateOptions o = validate_options(options);
        return finding_tuples(unlocked([&] { return validate(plan, metadata, o); }));
      },
      "plan"_a, "fwd_q"_a, "rev_q"_a, "fwd_kv"_a, "rev_kv"_a, "layout"_a, "options"_a);
}

}  // namespace

void bind_metadata(nb::module_& m) {
  m.def(
      "get_slice",
      [](const Fields& fields, std::int32_t rank) {
        return fields_of(metadata_from(fields).get_slice(Rank{rank}));
      },
      "fields"_a, "rank"_a);
  m.def(
      "normalize_dtype",
      [](const Fields& fields) { return fields_of(metadata_from(fields).normalize_dtype()); },
      "fields"_a);
  m.def(
      "metadata_text", [](const Fields& fields) { return to_string(metadata_from(fields)); },
      "fields"_a);
  m.def(
      "metadata_to_json",
      [](const Fields& fields, bool compact) {
        const Metadata metadata = metadata_from(fields);
        return unlocked(
            [&] { return to_json(metadata, compact ? JsonStyle::compact : JsonStyle::readable); });
      },
      "fields"_a, "compact"_a);
  m.def(
      "metadata_from_json",
      [](std::string_view text, std::string_view origin) {
        return fields_of(unlocked([&] { return metadata_from_json(text, origin); }));
      },
      "text"_a, "origin"_a);
  bind_validate(m);
}

}  // namespace waybill::python
