#include <algorithm>
#include <array>
#include <charconv>

#include "core/printable.h"
#include "figures.h"
#include "waybill/core/error.h"
#include "waybill/report/step_report.h"

namespace waybill {
namespace {

/// Names come from us or from the caller: quotes, backslashes and control characters are escaped.
std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20) {
      static constexpr std::string_view digits = "0123456789abcdef";
      result += "\\u00";
      result += digits[byte >> 4U];
      result += digits[byte & 15U];
    } else {
      result += c;
    }
  }
  return result + '"';
}

void append(std::string& out, std::int64_t value) {
  std::array<char, 24> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  out.append(buffer.data(), end);
}

/// Microseconds, to the nanosecond.
void append_us(std::string& out, double seconds) {
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), seconds * 1e6,
                                 std::chars_format::fixed, 3)
                       .ptr;
  out.append(buffer.data(), end);
}

class TraceWriter {
 public:
  void name(std::string_view what, std::int64_t pid, std::int64_t tid, std::string_view name) {
    open();
    out_ += "\"ph\":\"M\",\"name\":";
    out_ += json_string(what);
    place(pid, tid);
    out_ += ",\"args\":{\"name\":" + json_string(name) + "}}";
  }

  void phase(std::int64_t pid, std::int32_t rank, const PhasePrediction& phase) {
    const std::size_t r = rank;
    open();
    out_ += "\"ph\":\"X\",\"cat\":";
    out_ += moves_rows(phase.phase) ? "\"transfer\"" : "\"kernel\"";
    out_ += ",\"name\":" + json_string(to_string(phase.phase));
    place(pid, rank);
    out_ += ",\"ts\":";
    append_us(out_, phase.begin[r]);
    out_ += ",\"dur\":";
    append_us(out_, std::max(0.0, phase.end[r] - phase.begin[r]));
    out_ += ",\"args\":{\"alone_us\":";
    append_us(out_, phase.seconds[r]);
    if (!phase.links.empty()) {
      argument("nvlink_in_bytes", phase.links[r].nvlink_in);
      argument("nvlink_out_bytes", phase.links[r].nvlink_out);
      argument("network_in_bytes", phase.links[r].network_in);
      argument("network_out_bytes", phase.links[r].network_out);
    }
    argument("waits_for_rank", phase.waits_for[r]);
    out_ += "}}";
  }

  [[nodiscard]] std::string finish() && { return std::move(out_) + "\n]}\n"; }

 private:
  void open() {
    out_ += first_ ? "\n{" : ",\n{";
    first_ = false;
  }

  void place(std::int64_t pid, std::int64_t tid) {
    out_ += ",\"pid\":";
    append(out_, pid);
    out_ += ",\"tid\":";
    append(out_, tid);
  }

  void argument(std::string_view name, std::int64_t value) {
    out_ += ",\"";
    out_ += name;
    out_ += "\":";
    append(out_, value);
  }

  std::string out_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  bool first_ = true;
};

}  // namespace

std::string chrome_trace(std::span<const NamedStep> steps) {
  TraceWriter writer;
  std::int64_t first_pid = 0;
  for (const NamedStep& named : steps) {
    const StepPrediction& step = named.step;
    const std::int32_t ranks_per_node = step.options.hardware.ranks_per_node;
    for (std::int32_t rank = 0; rank < step.world_size; ++rank) {
      const std::int32_t node = rank / ranks_per_node;
      const std::int64_t pid = first_pid + node;
      if (rank % ranks_per_node == 0)
        writer.name("process_name", pid, rank, concat(printable_line(named.name), ", node ", node));
      writer.name("thread_name", pid, rank, concat("rank ", rank));
      for (const PhasePrediction& phase : step.phases) writer.phase(pid, rank, phase);
    }
    first_pid += (step.world_size + ranks_per_node - 1) / ranks_per_node;
  }
  return std::move(writer).finish();
}

}  // namespace waybill
