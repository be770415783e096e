#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/validate.h"

namespace waybill::python {

using namespace nb::literals;

namespace {

ValidateOptions options_from(const nb::tuple& values) {
  return {nb::cast<std::int64_t>(values[0]), nb::cast<std::int64_t>(values[1]),
          nb::cast<std::int64_t>(values[2])};
}

std::vector<IndexArray> arrays_from(nb::handle list) {
  std::vector<IndexArray> result;
  for (const nb::handle array : list) {
    result.push_back(index_array(nb::cast<ArrayArg>(array), "validate: attention layout"));
  }
  return result;
}

AttnLayout layout_from(const nb::tuple& t) {
  const auto array = [&](std::size_t i) {
    return index_array(nb::cast<ArrayArg>(t[i]), "validate: attention layout");
  };
  return {arrays_from(t[0]), arrays_from(t[1]), array(2),         array(3),
          array(4),          arrays_from(t[5]), arrays_from(t[6])};
}

}  // namespace

void bind_validate(nb::module_& m) {
  m.def(
      "validate_metadata",
      [](const Fields& fields, const nb::tuple& options) {
        const Metadata metadata = metadata_from(fields);
        const ValidateOptions o = options_from(options);
        return finding_tuples(unlocked([&] { return validate(metadata, o); }));
      },
      "fields"_a, "options"_a);
  m.def(
      "validate_pair",
      [](const Fields& fwd, const Fields& rev, const nb::tuple& options) {
        const Metadata forward = metadata_from(fwd);
        const Metadata reverse = metadata_from(rev);
        const ValidateOptions o = options_from(options);
        return finding_tuples(unlocked([&] { return validate(forward, reverse, o); }));
      },
      "fwd"_a, "rev"_a, "options"_a);
  m.def(
      "validate_plan",
      [](const QkvPlan& plan, const nb::tuple& options) {
        const ValidateOptions o = options_from(options);
        return finding_tuples(unlocked([&] { return validate(plan, o); }));
      },
      "plan"_a, "options"_a);
  m.def(
      "validate_all",
      [](const QkvPlan& plan, const Fields& fwd_q, const Fields& rev_q, const Fields& fwd_kv,
         const Fields& rev_kv, const nb::tuple& layout, const nb::tuple& options) {
        const E2eMetadata metadata{metadata_from(fwd_q),  metadata_from(rev_q),
                                   metadata_from(fwd_kv), metadata_from(rev_kv),
                                   layout_from(layout),   std::nullopt,
                                   std::nullopt};
        const ValidateOptions o = options_from(options);
        return finding_tuples(unlocked([&] { return validate(plan, metadata, o); }));
      },
      "plan"_a, "fwd_q"_a, "rev_q"_a, "fwd_kv"_a, "rev_kv"_a, "layout"_a, "options"_a);
}

}  // namespace waybill::python
