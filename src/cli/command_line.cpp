#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "numbers.h"
#include "program.h"
#include "suggest.h"

namespace waybill::cli {
namespace {

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names;
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

/// What was left over of a command line: the first option, else the first word.
std::string left_over_text(const CLI::App& app, std::vector<std::string> left) {
  const auto chosen = app.get_subcommands();
  const auto option = std::find_if(left.begin(), left.end(), [](const std::string& word) {
    return word.size() > 1 && word[0] == '-';
  });
  if (option == left.end()) {
    if (!chosen.empty())
      return concat(chosen.front()->get_name(), ": ", left.front(), " was not expected");
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

/// What CLI11 says of a command line, with the command that it is about.
std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  const auto chosen = app.get_subcommands();
  const std::string who = chosen.empty() ? "" : chosen.front()->get_name();
  std::string text = error.what();
  const std::string name = text.substr(0, text.find(':'));
  const std::string more = concat(" (waybill ", who.empty() ? "" : who + " ", "--help lists them)");
  if (error.get_name() == "RequiredError") {
    return concat(who.empty() ? "" : who + ": ", text, " (waybill ", who, " --help says more)");
  }
  if (error.get_name() != "ArgumentMismatch") return text;
  const bool is_missing = text.find("missing") != std::string::npos;
  return concat(
      name, is_missing ? ": got nothing, expected a value" : ": got it twice, expected once", more);
}

// Names, value and default alone: which options exclude each other is said where it is tried, and
// what a check is called says nothing.
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

}  // namespace

Option& Option::value_name(const std::string& name) {
  option_->type_name(name);
  // An empty variable of a script is not "without".
  if (name == "FILE" || name == "FOLDER") {
    option_->check([name](const std::string& text) {
      return text.empty() ? concat("got \"\", expected a ", name == "FILE" ? "file" : "folder")
                          : std::string();
    });
  }
  return *this;
}

Option& Option::group(const std::string& name) {
  option_->group(name);
  return *this;
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

Option& Option::between(std::int64_t least, std::int64_t most) {
  option_->check(number_between(least, most));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : "|") + word;
  option_->type_name(all);
  option_->check([words, all](const std::string& word) {
    if (std::find(words.begin(), words.end(), word) != words.end()) return std::string();
    return concat("got ", word, ", expected ", all, did_you_mean(word, words));
  });
  return *this;
}

Option& Option::not_negative() {
  option_->check(CLI::NonNegativeNumber);
  return *this;
}

Option& Option::positive() {
  option_->check(CLI::PositiveNumber);
  return *this;
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

Option Command::option(const std::string& names, std::string& value, const std::string& text) {
  return Option(app_->add_option(names, value, text));
}

Option Command::option(const std::string& names, std::int32_t& value, const std::string& text) {
  return Option(app_->add_option(names, value, text));
}

Option Command::option(const std::string& names, std::int64_t& value, const std::string& text) {
  return Option(app_->add_option(names, value, text));
}

Option Command::option(const std::string& names, std::uint64_t& value, const std::string& text) {
  return Option(app_->add_option(names, value, text));
}

Option Command::option(const std::string& names, double& value, const std::string& text) {
  return Option(app_->add_option(names, value, text));
}

Option Command::flag(const std::string& names, bool& value, const std::string& text) {
  return Option(app_->add_flag(names, value, text));
}

void Command::flag(const std::string& names, const std::function<void()>& call,
                   const std::string& text) {
  app_->add_flag_callback(names, call, text)->trigger_on_parse();
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

CommandLine::CommandLine(const std::string& name, const std::string& text,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(text, name)) {
  app_->formatter(std::make_shared<HelpFormatter>());
  app_->set_version_flag("--version", version, "Print the version and exit");
  app_->require_subcommand(0, 1);
  app_->fallthrough();
}

CommandLine::~CommandLine() = default;

Command CommandLine::program() const { return Command(app_.get()); }

std::optional<std::string> CommandLine::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return wrapped_help(app_->help(), text_width());
  } catch (const CLI::CallForVersion& version) {
    return concat(version.what(), "\n");
  } catch (const CLI::ExtrasError&) {
    throw UsageError(left_over_text(*app_, app_->remaining(true)));
  } catch (const CLI::ParseError& error) {
    throw UsageError(complaint(*app_, error));
  }
  return std::nullopt;
}

}  // namespace waybill::cli
