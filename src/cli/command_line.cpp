#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>

namespace waybill::cli {
namespace {

/// Letters to insert, delete, replace or exchange with their neighbour.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  std::iota(cost[0].begin(), cost[0].end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    cost[i][0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t other = a[i - 1] == b[j - 1] ? 0 : 1;
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + other});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

std::string_view without_dashes(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  return word;
}

/// Where the text of a line begins: after the last gap of two or more spaces, or its indentation.
std::size_t text_column(std::string_view line) {
  std::size_t column = std::min(line.find_first_not_of(' '), line.size());
  const std::size_t gap = line.find("  ", column);
  if (gap != std::string_view::npos) column = line.find_first_not_of(' ', gap);
  return std::min(column, line.size());
}

constexpr std::array package_commands = {"bench", "cmake-dir", "selftest"};  // in Python

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names(package_commands.begin(), package_commands.end());
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> names_of_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

/// The complaint about words that no option took: names the first option, else the first word.
std::string left_over_text(const CLI::App& app, const std::vector<std::string>& left) {
  const auto chosen = app.get_subcommands();
  const auto option = std::ranges::find_if(
      left, [](const std::string& word) { return word.size() > 1 && word[0] == '-'; });
  if (option == left.end()) {
    if (!chosen.empty())
      return concat(chosen.front()->get_name(), ": ", left.front(), " was not expected");
    if (std::ranges::find(package_commands, left.front()) != package_commands.end())
      return concat(left.front(), " is a command of the Python package: python -m waybill ",
                    left.front());
    return concat("there is no command ", left.front(),
                  did_you_mean(left.front(), names_of_commands(app)),
                  " (waybill --help lists them)");
  }
  std::vector<std::string> known = names_of_options(app);
  if (!chosen.empty()) {
    const std::vector<std::string> more = names_of_options(*chosen.front());
    known.insert(known.end(), more.begin(), more.end());
  }
  const std::string name = option->substr(0, option->find('='));
  const std::string who = chosen.empty() ? "waybill" : chosen.front()->get_name();
  return concat(who, ": there is no option ", name, did_you_mean(name, known), " (waybill ",
                chosen.empty() ? "" : who + " ", "--help lists them)");
}

/// The text of an error of CLI11, with the command that it is about.
std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  const auto chosen = app.get_subcommands();
  const std::string who = chosen.empty() ? "" : chosen.front()->get_name();
  std::string text = error.what();
  const bool excluded = error.get_name() == "ExcludesError";
  if (excluded) text.replace(text.find("excludes"), 8, "cannot be given with");
  if (excluded || error.get_name() == "RequiredError")
    return concat(who.empty() ? "" : who + ": ", text, " (waybill ", who, " --help says more)");
  if (error.get_name() != "ArgumentMismatch") return text;
  return concat(text.substr(0, text.find(':')),
                text.find("missing") != std::string::npos ? ": got nothing, expected a value"
                                                          : ": got it twice, expected once",
                " (waybill ", who.empty() ? "" : who + " ", "--help lists them)");
}

// Names, value and default alone: names of checks say nothing, errors say what excludes what.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string type = option->get_type_name();
    std::string text;
    if (option->get_type_size() != 0) {
      if (const std::string name = type.substr(0, type.find(':')); !name.empty()) text = " " + name;
      if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    }
    return option->get_required() ? text + " (required)" : text;
  }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string text = "  " + make_option_name(option, is_positional) + make_option_opts(option);
    const std::string column(get_column_width(), ' ');
    if (text.size() + 2 > column.size()) text += "\n";
    text += text.back() == '\n' ? column : column.substr(text.size());
    return text + make_option_desc(option) + "\n";
  }
};

/// Breaks lines of a help text at spaces; the rest of a line stands below where its text began.
std::string wrapped_help(std::string_view text, std::size_t width) {
  std::string result;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() && result.ends_with("\n\n")) continue;
    const std::size_t hanging = text_column(line);
    const std::size_t indent = hanging + 20 < width ? hanging : std::min<std::size_t>(4, width / 4);
    std::size_t first = hanging;  // no break before the text
    for (std::size_t room = width; line.size() > room; room = width - indent, first = 0) {
      std::size_t cut = line.rfind(' ', room);
      if (cut == std::string_view::npos || cut <= first) cut = line.find(' ', room);
      if (cut == std::string_view::npos) break;
      result += line.substr(0, cut);
      result += '\n';
      result.append(indent, ' ');
      line.remove_prefix(cut + 1);
    }
    result += line;
    result += '\n';
  }
  return result;
}

}  // namespace

std::optional<std::int64_t> parse_number(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::string joined(const std::vector<std::string>& words, std::string_view separator) {
  std::string text;
  for (const std::string& word : words) text += concat(text.empty() ? "" : separator, word);
  return text;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> known) {
  const std::string_view bare = without_dashes(word);
  if (bare.empty() || bare.size() > 60) return "";
  const std::string* best = nullptr;
  std::size_t limit = std::max<std::size_t>(1, bare.size() / 3) + 1;
  for (const std::string& candidate : known) {
    const std::string_view name = without_dashes(candidate);
    std::size_t far = distance(bare, name);
    const bool begins = bare.size() >= 3 && name.starts_with(bare);
    const bool ends = name.size() >= 3 && bare.ends_with(concat("-", name));  // --num-experts
    if (begins || ends) far = std::min<std::size_t>(far, 1);
    if (far >= limit) continue;
    limit = far;
    best = &candidate;
  }
  return best == nullptr ? "" : ", did you mean " + *best + "?";
}

Option& Option::value_name(const std::string& name) {
  option_->type_name(name);
  if (name != "FILE") return *this;
  // An empty variable of a script is not "without".
  return check([](const std::string& text) {
    return std::string(text.empty() ? "got \"\", expected a file" : "");
  });
}

Option& Option::show_default() {
  option_->capture_default_str();
  return *this;
}

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::check(const std::function<std::string(const std::string&)>& complaint) {
  option_->check(complaint);
  return *this;
}

Option& Option::read_by(const std::function<void(const std::string&)>& read,
                        const std::function<std::string(const std::string&)>& expected) {
  return check([read, expected](const std::string& value) {
    try {
      read(value);
      return std::string();
    } catch (const InvalidArgument&) {
      return concat("got ", value, ", expected ", expected(value));
    }
  });
}

Option& Option::between(std::int64_t min, std::int64_t max, bool or_auto) {
  return check([min, max, or_auto](const std::string& text) -> std::string {
    const std::optional<std::int64_t> number = parse_number(text);
    if ((or_auto && text == "auto") || (number && min <= *number && *number <= max)) return "";
    return or_auto ? concat("got ", text, ", expected auto or a number from ", min, " to ", max)
                   : concat("got ", text, ", expected ", min, "..", max);
  });
}

Option& Option::real_between(double min, double max) {
  return check([min, max](const std::string& text) -> std::string {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    // The comparison is false for what is no number.
    if (error == std::errc() && rest == end && min <= number && number <= max) return "";
    return concat("got ", text, ", expected a number from ", min, " to ", max);
  });
}

Option& Option::one_of(const std::vector<std::string>& words) {
  const std::string all = joined(words, "|");
  option_->type_name(all);
  return check([words, all](const std::string& word) {
    if (std::ranges::find(words, word) != words.end()) return std::string();
    return concat("got ", word, ", expected ", all, did_you_mean(word, words));
  });
}

Option& Option::at_least(std::int64_t min) {
  return check([min](const std::string& text) -> std::string {
    const std::optional<std::int64_t> number = parse_number(text);
    return number && min <= *number ? "" : concat("got ", text, ", expected a number from ", min);
  });
}

Option& Option::excludes(Option other) {
  option_->excludes(other.option_);
  return *this;
}

Option& Option::needs(Option other) {
  option_->needs(other.option_);
  return *this;
}

Command Command::add_command(const std::string& name, const std::string& text) {
  return Command(app_->add_subcommand(name, text));
}

CLI::Option* Command::in_group(CLI::Option* option) const {
  return group_.empty() ? option : option->group(group_);
}

template <class Value>
Option Command::option(const std::string& names, Value& value, const std::string& text) {
  return Option(in_group(app_->add_option(names, value, text)));
}
template Option Command::option(const std::string&, std::string&, const std::string&);
template Option Command::option(const std::string&, std::int32_t&, const std::string&);
template Option Command::option(const std::string&, std::int64_t&, const std::string&);
template Option Command::option(const std::string&, std::uint64_t&, const std::string&);
template Option Command::option(const std::string&, double&, const std::string&);

Option Command::flag(const std::string& names, bool& value, const std::string& text) {
  return Option(in_group(app_->add_flag(names, value, text)));
}

Option Command::option_named(const std::string& name) const {
  return Option(app_->get_option(name));
}

std::vector<Option> Command::options_of(const std::vector<std::string>& groups) const {
  std::vector<Option> found;
  for (CLI::Option* option : app_->get_options()) {
    if (std::find(groups.begin(), groups.end(), option->get_group()) != groups.end())
      found.emplace_back(option);
  }
  return found;
}

bool Command::is_given(const std::string& name) const { return app_->count(name) > 0; }

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::when_chosen(const std::function<void()>& call) { app_->callback(call); }

std::shared_ptr<CLI::App> make_app(const std::string& name, const std::string& text,
                                   const std::string& version) {
  auto app = std::make_shared<CLI::App>(text, name);
  app->formatter(std::make_shared<HelpFormatter>());
  app->set_version_flag("--version", version, "Print the version and exit");
  app->require_subcommand(0, 1);
  app->fallthrough();
  return app;
}

std::optional<std::string> parse(CLI::App& app, int argc, char** argv, std::size_t width) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return wrapped_help(app.help(), width);
  } catch (const CLI::CallForVersion& version) {
    return concat(version.what(), "\n");
  } catch (const CLI::ExtrasError&) {
    throw UsageError(left_over_text(app, app.remaining(true)));
  } catch (const CLI::ParseError& error) {
    throw UsageError(complaint(app, error));
  }
  return std::nullopt;
}

}  // namespace waybill::cli
