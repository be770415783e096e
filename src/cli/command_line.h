#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

// What options are, without the library that reads them: only command_line.cpp includes CLI11,
// which takes seconds to compile.

namespace waybill::cli {

/// An option or a positional argument of a command: a name for it, to be copied.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  /// What --help calls the value; "": nothing.
  Option& value_name(const std::string& name);
  /// The heading in --help under which it stands.
  Option& group(const std::string& name);
  /// --help says what the variable holds now.
  Option& show_default();
  Option& required();

  /// @param complaint returns "" for a value that is right
  Option& check(const std::function<std::string(const std::string&)>& complaint);
  Option& between(std::int64_t least, std::int64_t most);
  Option& one_of(const std::vector<std::string>& words);
  Option& not_negative();
  Option& positive();

  Option& excludes(Option other);
  Option& needs(Option other);

 private:
  CLI::Option* option_;
};

/// A command, or the program before any: a name for it, to be copied.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  [[nodiscard]] Command add_command(const std::string& name, const std::string& text);

  /// `names` are such as "-o,--output", or "FILE" for a positional argument. The variable takes the
  /// value, and must live until the command has run.
  Option option(const std::string& names, std::string& value, const std::string& text);
  Option option(const std::string& names, std::int32_t& value, const std::string& text);
  Option option(const std::string& names, std::int64_t& value, const std::string& text);
  Option option(const std::string& names, std::uint64_t& value, const std::string& text);
  Option option(const std::string& names, double& value, const std::string& text);
  Option flag(const std::string& names, bool& value, const std::string& text);
  /// Called as soon as the flag is read.
  void flag(const std::string& names, const std::function<void()>& call, const std::string& text);

  [[nodiscard]] Option option_named(const std::string& name) const;
  /// All options of these groups, as far as they are there.
  [[nodiscard]] std::vector<Option> options_of(const std::vector<std::string>& groups) const;
  [[nodiscard]] bool is_given(const std::string& name) const;

  /// What --help says last.
  void footer(const std::string& text);
  /// Called when the command was chosen and its options are read.
  void when_chosen(const std::function<void()>& call);

 private:
  CLI::App* app_;
};

/// A program with commands, of which at most one is given; its own options may stand behind it.
class CommandLine {
 public:
  CommandLine(const std::string& name, const std::string& text, const std::string& version);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  [[nodiscard]] Command program() const;

  /// @return what the user asked to see instead of a command: help, or the version
  /// @throws UsageError
  [[nodiscard]] std::optional<std::string> parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace waybill::cli
