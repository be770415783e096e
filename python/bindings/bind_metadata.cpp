#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "bindings.h"
#include "metadata_fields.h"
#include "waybill/json/plan_json.h"

namespace waybill::python {

using namespace nb::literals;

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
}

}  // namespace waybill::python
