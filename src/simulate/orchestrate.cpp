#include "waybill/simulate/orchestrate.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "copy_job.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

void check_options(const char* who, const SimulateOptions& options) {
  require(options.num_threads >= 0, who, ": num_threads = ", options.num_threads,
          ", expected >= 0");
}

void check_world(const char* who, std::size_t num_ranks) {
  require(1 <= num_ranks && num_ranks <= static_cast<std::size_t>(max_world_size), who,
          ": world_size = ", num_ranks, ", expected 1..", max_world_size);
}

void check_shapes(const char* who, const Shape& tensor, const Shape& output) {
  require(tensor[0] == output[0] && tensor[2] == output[2], who, ": output has shape ",
          to_string(output), ", expected [", tensor[0], ", rows, ", tensor[2],
          "] for tensor of shape ", to_string(tensor));
  check_world(who, static_cast<std::size_t>(tensor[0]));
}

/// R_w of simulate_communication.
std::vector<std::int64_t> recv_rows(const char* who, const IndexArray& counts, std::int64_t world) {
  require(counts.shape() != Shape{0}, who, ": num_recv_tokens is missing, expected [", world, ", ",
          world + 1, "] counts, or [", world, ", 1]");
  require(counts.ndim() == 2 && counts.dim(0) == world && counts.dim(1) >= 1, who,
          ": num_recv_tokens has shape ", to_string(counts.shape()), ", expected [", world, ", ",
          world + 1, "]");
  const Int64View values(counts);
  const std::int64_t columns = counts.dim(1);
  std::vector<std::int64_t> rows;
  for (std::int64_t w = 0; w < world; ++w) {
    const auto row = values.span().subspan(static_cast<std::size_t>(w * columns),
                                           static_cast<std::size_t>(columns));
    const auto [low, high] = std::ranges::minmax(row);
    require(low >= 0, who, ": num_recv_tokens of rank ", w, " holds ", low, ", expected >= 0");
    rows.push_back(high);
  }
  return rows;
}

}  // namespace

void orchestrate_simulate(const ConstTensorView& tensor, const TensorView& output,
                          const Metadata& metadata, const SimulateOptions& options) {
  const char* who = "orchestrate_simulate";
  check_options(who, options);
  detail::check_view(who, "tensor", tensor, 3);
  detail::check_view(who, "output", output, 3);
  require(tensor.dtype == output.dtype, who, ": output has dtype ", output.dtype, ", expected ",
          tensor.dtype, ", that of tensor");
  check_shapes(who, tensor.shape, output.shape);
  detail::check_memory(who, {&tensor, 1}, {&output, 1});
  detail::CopyJob job{who, detail::views_of_ranks(tensor), detail::views_of_ranks(output),
                      tensor.shape, output.shape};
  detail::run_job(job, metadata, options);
}

IndexArray source_rows(const Shape& tensor_shape, const Shape& output_shape,
                       const Metadata& metadata, const SimulateOptions& options) {
  const char* who = "orchestrate_simulate";
  check_options(who, options);
  for (const Shape* shape : {&tensor_shape, &output_shape}) {
    require(shape->size() == 3, who, ": ", shape == &tensor_shape ? "tensor" : "output",
            " has shape ", to_string(*shape), ", expected 3 axes");
    std::ignore = num_elements(*shape, who);
  }
  check_shapes(who, tensor_shape, output_shape);
  const std::int64_t world = tensor_shape[0];
  const std::int64_t num_rows = tensor_shape[1];
  IndexArray numbers({world, num_rows});
  std::iota(numbers.i64().begin(), numbers.i64().end(), std::int64_t{0});
  IndexArray rows = IndexArray::full({world, output_shape[1]}, -1);
  const ConstTensorView from(numbers.data(), DType::int64, {world, num_rows, 1});
  const TensorView to(rows.data(), DType::int64, {world, output_shape[1], 1});
  detail::CopyJob job{who, detail::views_of_ranks(from), detail::views_of_ranks(to), tensor_shape,
                      output_shape};
  detail::run_job(job, metadata, options);
  return rows;
}

std::vector<HostTensor> simulate_communication(std::span<const ConstTensorView> tensors,
                                               const Metadata& metadata,
                                               const SimulateOptions& options) {
  const char* who = "simulate_communication";
  check_options(who, options);
  check_world(who, tensors.size());
  for (const ConstTensorView& tensor : tensors) detail::check_view(who, "tensor", tensor, 2);
  const auto world = static_cast<std::int64_t>(tensors.size());
  const std::vector<std::int64_t> rows = recv_rows(who, metadata.num_recv_tokens, world);
  detail::CopyJob job{who, {tensors.begin(), tensors.end()}, {}, {}, {}};
  for (const std::int64_t num_rows : rows) {  // without memory until all is checked
    job.outputs.emplace_back(nullptr, tensors[0].dtype, Shape{num_rows, tensors[0].shape[1]});
  }
  detail::check_ends(job);
  const std::vector<detail::CopySegment> segments = detail::checked_segments(job, metadata);
  const detail::Destinations destinations =
      detail::find_destinations(job, segments, options.overlap);
  std::vector<std::int64_t> sent(tensors.size());
  for (const detail::CopySegment& segment : segments) {
    std::int64_t& to_rank = sent[segment.dst_rank];
    require(!__builtin_add_overflow(to_rank, segment.rows, &to_rank), who,
            ": the entries send 2^63 rows or more to rank ", segment.dst_rank);
  }
  std::vector<HostTensor> result;
  for (std::size_t w = 0; w < tensors.size(); ++w) {
    require(sent[w] == rows[w], who, ": num_recv_tokens of rank ", w, " gives ", rows[w],
            " rows, expected ", sent[w], ", the rows that the entries send to it");
  }
  for (const TensorView& output : job.outputs) result.emplace_back(output.dtype, output.shape);
  for (std::size_t w = 0; w < result.size(); ++w) job.outputs[w] = result[w].view();
  detail::copy_segments(job, segments, destinations, options.num_threads);
  return result;
}

void simulate_dispatch(std::span<const ConstTensorView> sources,
                       std::span<const TensorView> outputs, const SparseMetadata& metadata,
                       const SimulateOptions& options) {
  const char* who = "simulate_dispatch";
  check_options(who, options);
  check_world(who, sources.size());
  require(sources.size() == outputs.size(), who, ": got ", outputs.size(), " outputs, expected ",
          sources.size(), ", as many as sources");
  for (const ConstTensorView& source : sources) detail::check_view(who, "source", source, 2);
  for (const TensorView& output : outputs) detail::check_view(who, "output", output, 2);
  detail::CopyJob job{
      who, {sources.begin(), sources.end()}, {outputs.begin(), outputs.end()}, {}, {}};
  detail::check_ends(job);
  detail::check_memory(who, sources, outputs);
  detail::run_job(job, metadata, options);
}

}  // namespace waybill
