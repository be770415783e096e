#include <bit>
#include <cstring>
#include <optional>

#include "json/text.h"
#include "waybill/core/index_array.h"
#include "waybill/json/file.h"

namespace waybill {
namespace {

using detail::JsonIntegers;
using detail::JsonList;
using detail::JsonReal;
using detail::JsonValue;

constexpr std::int64_t max_count = std::int64_t{1} << 53;

[[noreturn]] void fail(std::string_view origin, const std::string& text) {
  throw IoError(concat(origin, ": ", text));
}

/// Counts must be integers >= 0; floats are taken where they are integral.
template <class Number>
std::int64_t count_from(Number value, std::int64_t row, std::int64_t column,
                        std::string_view origin) {
  const bool in_range = value >= 0 && value <= static_cast<Number>(max_count);
  if (!in_range || static_cast<Number>(static_cast<std::int64_t>(value)) != value) {
    fail(origin, concat("rows of rank ", row, " for expert ", column, " = ", value,
                        ", expected an integer from 0 to 2^53"));
  }
  return static_cast<std::int64_t>(value);
}

// JSON: a list of a list per rank, or an object that has it as "rows".

std::vector<std::int64_t> line_of(const detail::JsonNode& node, std::int64_t row,
                                  std::string_view origin) {
  if (!node.is_list()) node.fail("a list of counts, one per expert");
  if (const auto* integers = std::get_if<JsonIntegers>(&node.value().value)) {
    for (std::int64_t e = 0; e < std::ssize(*integers); ++e)
      (void)count_from((*integers)[e], row, e, origin);
    return *integers;
  }
  std::vector<std::int64_t> line;
  for (const detail::JsonNode& item : node.items()) {
    const std::int64_t column = std::ssize(line);
    if (const auto* real = std::get_if<JsonReal>(&item.value().value)) {
      line.push_back(count_from(real->value, row, column, origin));
    } else if (const auto* integer = std::get_if<std::int64_t>(&item.value().value)) {
      line.push_back(count_from(*integer, row, column, origin));
    } else {
      item.fail("a number of rows");
    }
  }
  return line;
}

IndexArray counts_from_json(std::string_view text, std::string_view origin) {
  const JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  const detail::JsonNode table = root.is_list() ? root : root.at("rows");
  const auto* const flat = std::get_if<JsonIntegers>(&table.value().value);
  if (!table.is_list() || (flat != nullptr && !flat->empty()))
    table.fail("a list of lists: rows of each rank for each expert");
  std::vector<std::int64_t> counts;
  std::int64_t ranks = 0, experts = 0;
  for (const detail::JsonNode& node : table.items()) {
    const std::vector<std::int64_t> line = line_of(node, ranks, origin);
    if (ranks == 0) experts = std::ssize(line);
    if (std::ssize(line) != experts) node.fail(concat(experts, " counts, as in the list before"));
    counts.insert(counts.end(), line.begin(), line.end());
    ++ranks;
  }
  return IndexArray({ranks, experts}, counts);
}

// npy: a magic, a header that is a literal of Python, the elements.

/// The text after 'key': in the header.
std::string_view field(std::string_view header, std::string_view key, std::string_view origin) {
  const std::size_t begin = header.find(concat('\'', key, "':"));
  if (begin == std::string_view::npos) fail(origin, concat("the header of npy has no ", key));
  std::string_view rest = header.substr(begin + key.size() + 3);
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  return rest;
}

std::vector<std::int64_t> shape_from(std::string_view text) {
  std::vector<std::int64_t> shape;
  for (const char c : text.substr(0, text.find(')'))) {
    if (c == '(') shape.push_back(-1);
    if (c == ',') shape.push_back(-1);
    if (c < '0' || c > '9' || shape.empty() || shape.back() > max_count / 10) continue;
    shape.back() = std::max<std::int64_t>(shape.back(), 0) * 10 + (c - '0');
  }
  std::erase(shape, -1);
  return shape;
}

template <class Element>
std::int64_t element_at(const char* bytes, std::int64_t row, std::int64_t column,
                        std::string_view origin) {
  Element element;
  std::memcpy(&element, bytes, sizeof(element));
  constexpr bool fits = std::is_integral_v<Element> && !std::is_same_v<Element, std::uint64_t>;
  using Number = std::conditional_t<fits, std::int64_t, double>;
  return count_from(static_cast<Number>(element), row, column, origin);
}

using ReadElement = std::int64_t (*)(const char*, std::int64_t, std::int64_t, std::string_view);

std::pair<ReadElement, std::int64_t> reader_of(std::string_view descr, std::string_view origin) {
  static_assert(std::endian::native == std::endian::little);
  const std::string_view type = descr.substr(1, descr.find('\'', 1) - 1);
  if (type == "|i1") return {element_at<std::int8_t>, 1};
  if (type == "|u1") return {element_at<std::uint8_t>, 1};
  if (type == "<i2") return {element_at<std::int16_t>, 2};
  if (type == "<u2") return {element_at<std::uint16_t>, 2};
  if (type == "<i4") return {element_at<std::int32_t>, 4};
  if (type == "<u4") return {element_at<std::uint32_t>, 4};
  if (type == "<i8") return {element_at<std::int64_t>, 8};
  if (type == "<u8") return {element_at<std::uint64_t>, 8};
  if (type == "<f4") return {element_at<float>, 4};
  if (type == "<f8") return {element_at<double>, 8};
  fail(origin, concat("got elements of type ", detail::excerpt(type),
                      ", expected integers or integral floats (i1 to i8, u1 to u8, f4, f8)"));
}

constexpr std::string_view npy_magic = "\x93NUMPY";

IndexArray counts_from_npy(std::string_view bytes, std::string_view origin) {
  const bool is_npy = bytes.starts_with(npy_magic) && bytes.size() >= 12;
  if (!is_npy) fail(origin, "got no npy array, expected counts [ranks, experts]");
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i]));
  };
  const bool is_long = byte(6) >= 2;
  std::size_t size = byte(8) | byte(9) << 8U;
  if (is_long) size |= byte(10) << 16U | byte(11) << 24U;
  const std::size_t first = is_long ? 12 : 10;
  if (size > bytes.size() - first) fail(origin, "the header of npy is cut off");
  const std::string_view header = bytes.substr(first, size);
  const std::vector<std::int64_t> shape = shape_from(field(header, "shape", origin));
  if (shape.size() != 2) {
    fail(origin,
         concat("got an array of ", shape.size(), " dimensions, expected [ranks, experts]"));
  }
  const auto [read, width] = reader_of(field(header, "descr", origin), origin);
  const bool by_column = field(header, "fortran_order", origin).starts_with("True");
  const std::string_view data = bytes.substr(first + size);
  const std::int64_t ranks = shape[0], experts = shape[1];
  if (ranks > 0 && experts > std::ssize(data) / width / ranks) {
    fail(origin, concat("got ", data.size(), " bytes of elements, expected ", ranks, " x ", experts,
                        " x ", width));
  }
  std::vector<std::int64_t> counts;
  counts.reserve(static_cast<std::size_t>(ranks * experts));
  for (std::int64_t r = 0; r < ranks; ++r) {
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::int64_t at = by_column ? e * ranks + r : r * experts + e;
      counts.push_back(read(data.data() + at * width, r, e, origin));
    }
  }
  return IndexArray({ranks, experts}, counts);
}

// npz: a ZIP file of npy files, here those that are stored as they are.

/// An unsigned number of `width` bytes. A file that ends before it is cut off.
std::size_t number_at(std::string_view bytes, std::size_t at, std::size_t width,
                      std::string_view origin) {
  if (at > bytes.size() || width > bytes.size() - at) fail(origin, "the npz file is cut off");
  std::size_t number = 0;
  for (std::size_t i = 0; i < width; ++i)
    number |= static_cast<std::size_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  return number;
}

/// A file of the directory at `at`, and moves `at` after it.
std::pair<std::string, std::string_view> next_file(std::string_view bytes, std::size_t& at,
                                                   std::string_view origin) {
  const auto number = [&](std::size_t offset, std::size_t width) {
    return number_at(bytes, at + offset, width, origin);
  };
  if (number(0, 4) != 0x02014b50) fail(origin, "the directory of the npz file is damaged");
  const std::size_t method = number(10, 2), size = number(20, 4), local = number(42, 4);
  const std::size_t name_size = number(28, 2);
  (void)number(46, name_size == 0 ? 0 : 1);
  std::string name(bytes.substr(at + 46, name_size));
  if (method != 0) {
    fail(origin, concat(detail::excerpt(name),
                        " is compressed, expected a file of numpy.savez, which does not compress"));
  }
  const std::size_t first = local + 30 + number_at(bytes, local + 26, 2, origin) +
                            number_at(bytes, local + 28, 2, origin);
  if (first > bytes.size() || size > bytes.size() - first) fail(origin, "the npz file is cut off");
  at += 46 + name_size + number(30, 2) + number(32, 2);
  if (name.ends_with(".npy")) name.resize(name.size() - 4);
  return {name, bytes.substr(first, size)};
}

/// The array "rows", or the only one.
IndexArray counts_from_npz(std::string_view bytes, std::string_view origin) {
  const std::size_t end = bytes.rfind("PK\x05\x06");
  if (end == std::string_view::npos) fail(origin, "the npz file is cut off");
  const std::size_t num_files = number_at(bytes, end + 10, 2, origin);
  std::size_t at = number_at(bytes, end + 16, 4, origin);
  std::string names;
  std::optional<std::string_view> only, rows;
  for (std::size_t i = 0; i < num_files; ++i) {
    const auto [name, data] = next_file(bytes, at, origin);
    if (name == "rows") rows = data;
    if (i == 0) only = data;
    names += (i > 0 ? ", " : "") + detail::excerpt(name);
  }
  if (!rows && num_files == 1) rows = only;
  if (!rows) {
    fail(origin, concat("got the arrays ", num_files == 0 ? "(none)" : names,
                        ", expected one that is named rows, or only one"));
  }
  return counts_from_npy(*rows, origin);
}

}  // namespace

IndexArray expert_counts_from(std::string_view bytes, std::string_view origin) {
  IndexArray counts = bytes.starts_with("PK")        ? counts_from_npz(bytes, origin)
                      : bytes.starts_with(npy_magic) ? counts_from_npy(bytes, origin)
                                                     : counts_from_json(bytes, origin);
  if (counts.size() == 0)
    fail(origin, concat("got counts of shape ", to_string(counts.shape()),
                        ", expected [ranks, experts] with at least one of each"));
  return counts;
}

IndexArray expert_ids_from(std::string_view text, std::string_view origin) {
  const JsonValue value = detail::parse_json(text, origin);
  const detail::JsonNode root(value, origin);
  const detail::JsonNode table = root.is_list() ? root : root.at("ids");
  std::vector<std::int64_t> ids;
  std::int64_t tokens = 0;
  std::int64_t topk = 0;
  if (!table.is_list() || std::holds_alternative<JsonIntegers>(table.value().value))
    table.fail("a list of lists: ids of the experts of each token");
  for (const detail::JsonNode& token : table.items()) {
    const auto* const line = std::get_if<JsonIntegers>(&token.value().value);
    if (line == nullptr || line->empty()) token.fail("a list of ids of experts, integers");
    if (tokens++ == 0) topk = std::ssize(*line);
    if (std::ssize(*line) != topk)
      token.fail(concat(topk, " ids as of the first token, not ", line->size()));
    ids.insert(ids.end(), line->begin(), line->end());
  }
  return IndexArray({tokens, topk}, ids);
}

}  // namespace waybill
