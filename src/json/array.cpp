#include <string>
#include <utility>

#include "parts.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

void write_nested(JsonWriter& writer, const Shape& shape, const Int64View& values, std::size_t axis,
                  std::int64_t& next) {
  if (axis == shape.size()) {
    writer.integer(values[next++]);
    return;
  }
  writer.open_list(true);
  for (std::int64_t i = 0; i < shape[axis]; ++i) {
    write_nested(writer, shape, values, axis + 1, next);
  }
  writer.close();
}

/// Appends the elements below `value`. The lists must have the extents of the shape, which thereby
/// is checked before anything of its size is allocated.
class NestedReader {
 public:
  NestedReader(const JsonNode& data, const Shape& shape) : data_(&data), shape_(&shape) {}

  std::vector<std::int64_t> read() {
    add(data_->value(), 0);
    return std::move(elements_);
  }

 private:
  void add(const JsonValue& value, std::size_t axis) {
    if (axis == shape_->size()) {
      const auto* number = std::get_if<std::int64_t>(&value.value);
      if (number == nullptr) fail(value, "an integer");
      elements_.push_back(*number);
      return;
    }
    if (const auto* integers = std::get_if<JsonIntegers>(&value.value)) {
      check_extent(value, integers->size(), axis);
      if (axis + 1 < shape_->size() && !integers->empty()) {
        path_ += "/0";
        fail(JsonValue{integers->front()}, "a list, as the shape says");
      }
      elements_.insert(elements_.end(), integers->begin(), integers->end());
      return;
    }
    const auto* list = std::get_if<JsonList>(&value.value);
    if (list == nullptr) fail(value, "a list, as the shape says");
    check_extent(value, list->size(), axis);
    const std::size_t path_size = path_.size();
    for (std::size_t i = 0; i < list->size(); ++i) {
      path_ += concat('/', i);
      add((*list)[i], axis + 1);
      path_.resize(path_size);
    }
  }

  void check_extent(const JsonValue& value, std::size_t size, std::size_t axis) const {
    const std::int64_t extent = (*shape_)[axis];
    if (static_cast<std::int64_t>(size) == extent) return;
    fail(value,
         concat("a list of ", extent, ", extent ", axis, " of the shape ", to_string(*shape_)));
  }

  [[noreturn]] void fail(const JsonValue& value, std::string_view expected) const {
    data_->below(value, path_).fail(expected);
  }

  const JsonNode* data_;
  const Shape* shape_;
  std::string path_;  // below "data"
  std::vector<std::int64_t> elements_;
};

Shape read_shape(const JsonNode& node) {
  const std::vector<std::int64_t>& shape = node.integers();
  if (shape.size() > Shape::max_axes) node.fail(concat("at most ", Shape::max_axes, " extents"));
  check_at(node, [&] { (void)num_elements(shape, "shape"); });
  return Shape(std::span(shape));
}

DType read_dtype(const JsonNode& node) {
  for (const DType dtype :
       {DType::boolean, DType::int32, DType::uint32, DType::int64, DType::uint64}) {
    if (node.string() == dtype_name(dtype)) return dtype;
  }
  node.fail("one of bool, int32, uint32, int64, uint64");
}

}  // namespace

void write_array(JsonWriter& writer, const IndexArray& array) {
  writer.open_object(true);
  writer.key("shape").integers(array.shape());
  writer.key("dtype").string(dtype_name(array.dtype()));
  writer.key("data");
  const Int64View values(array);
  std::int64_t next = 0;
  write_nested(writer, array.shape(), values, 0, next);
  writer.close();
}

void write_array(JsonWriter& writer, const std::optional<IndexArray>& array) {
  if (array) {
    write_array(writer, *array);
  } else {
    writer.null();
  }
}

IndexArray read_array(const JsonNode& node) {
  node.check_keys({"shape", "dtype", "data"});
  Shape shape = read_shape(node.at("shape"));
  const DType dtype = read_dtype(node.at("dtype"));
  const JsonNode data = node.at("data");
  std::vector<std::int64_t> elements = NestedReader(data, shape).read();
  IndexArray array(shape, elements);
  if (dtype == DType::int64) return array;
  check_at(data, [&] { array = array.to(dtype, "data"); });
  return array;
}

std::optional<IndexArray> read_array(const std::optional<JsonNode>& node) {
  return node ? std::optional(read_array(*node)) : std::nullopt;
}

void write_arrays(JsonWriter& writer, const std::vector<IndexArray>& arrays) {
  if (arrays.size() == 1 && arrays.front().ndim() != 1) {
    write_array(writer, arrays.front());
    return;
  }
  writer.open_object().key("ragged").open_list();
  for (const IndexArray& array : arrays) write_array(writer, array);
  writer.close().close();
}

std::vector<IndexArray> read_arrays(const JsonNode& node) {
  const std::optional<JsonNode> ragged = node.find("ragged");
  if (!ragged) return {read_array(node)};
  node.check_keys({"ragged"});
  std::vector<IndexArray> arrays;
  for (const JsonNode& item : ragged->items()) arrays.push_back(read_array(item));
  return arrays;
}

}  // namespace waybill::detail
