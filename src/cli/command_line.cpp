#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "console.h"

namespace waybill::cli {

Option& Option::value_name(const std::string& name) {
  option_->type_name(name);
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
  option_->check(CLI::Range(least, most));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& words) {
  option_->check(CLI::IsMember(words));
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
  app_->set_version_flag("--version", version, "Print the version and leave");
  app_->require_subcommand(0, 1);
  app_->fallthrough();
}

CommandLine::~CommandLine() = default;

Command CommandLine::program() const { return Command(app_.get()); }

std::optional<std::string> CommandLine::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return app_->help();
  } catch (const CLI::CallForVersion& version) {
    return concat(version.what(), "\n");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  return std::nullopt;
}

}  // namespace waybill::cli
