#pragma once

#include <functional>
#include <string>

#include "command_line.h"
#include "program.h"

namespace waybill::cli {

/// What the commands share while the program runs.
struct Program {
  Console console;
  std::string command_line;  ///< as it was typed, quoted for a shell
  std::function<int()> run;  ///< the chosen command; set while options are read
};

/// Each adds one command with its options, help and examples to the program.
void add_demo_command(Command app, Program& program);
void add_plan_command(Command app, Program& program);
void add_metadata_command(Command app, Program& program);
void add_simulate_command(Command app, Program& program);
void add_validate_command(Command app, Program& program);
void add_show_command(Command app, Program& program);
void add_explain_command(Command app, Program& program);
void add_compare_command(Command app, Program& program);
void add_experts_command(Command app, Program& program);
void add_doctor_command(Command app, Program& program);
void add_calibrate_command(Command app, Program& program);

}  // namespace waybill::cli
