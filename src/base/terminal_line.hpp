#pragma once

namespace accelerate::detail {

/// Erases the progress bar's unfinished line on the terminal, if there is one, so that a log line
/// does not begin in the middle of it. The bar comes back with its next writing.
void clear_terminal_line();

}  // namespace accelerate::detail
