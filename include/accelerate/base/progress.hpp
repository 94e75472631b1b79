#pragma once

#include <accelerate/base/arg.hpp>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

namespace accelerate {

/// How a progress bar looks and where it goes.
class ProgressOptions {
 public:
  ProgressOptions() = default;
  explicit ProgressOptions(std::int64_t total) : total_(total) {}

  /// How many there are to do, or nothing when nobody knows: then there is a count and a rate, but
  /// no bar and no remaining time.
  ACCELERATE_ARG(std::optional<std::int64_t>, total);
  /// What stands before the bar.
  ACCELERATE_ARG(std::string, description);
  /// What is counted, in the rate ("12.3 batches/s"). "bytes" are written as KiB, MiB, GiB.
  ACCELERATE_ARG(std::string, unit) = "batches";
  /// How many were already done, in a run before this one.
  ACCELERATE_ARG(std::int64_t, initial) = 0;
  /// Whether anything is written. Default: only on the process with rank 0.
  ACCELERATE_ARG(std::optional<bool>, enabled);
  /// The least time between two writings, in seconds. Default: 0.1 on a terminal, 10 elsewhere.
  ACCELERATE_ARG(std::optional<double>, interval);
  /// Nothing is written in the first so many seconds, and nothing at all when it is done by then.
  ACCELERATE_ARG(double, delay) = 0.0;
  /// Where it is written. Default: stderr.
  ACCELERATE_ARG(std::ostream*, output) = nullptr;
  /// Whether the output is a terminal, where one line is written over and over. Default: asked of
  /// stderr; false for another output.
  ACCELERATE_ARG(std::optional<bool>, terminal);
};

/// A progress bar for a training loop. On a terminal it keeps one line up to date; elsewhere (a log
/// file, a batch system) it writes a line every ten seconds. It may be advanced as often as wanted:
/// a call that writes nothing costs a look at the clock.
///
/// The object belongs to one thread.
class Progress {
 public:
  explicit Progress(ProgressOptions options = ProgressOptions());
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  Progress(Progress&&) noexcept;
  Progress& operator=(Progress&&) noexcept;
  /// Writes the last state and ends the line.
  ~Progress();

  /// `count` more are done.
  void advance(std::int64_t count = 1);
  /// Now `done` are done in all.
  void set(std::int64_t done);
  /// What stands at the end of the line, for example "loss 0.123". Shown with the next writing.
  void text(std::string text);
  /// Ends it early: writes the last state and ends the line. Later calls do nothing.
  void close();

  std::int64_t done() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate
