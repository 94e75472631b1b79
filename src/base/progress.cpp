#include <accelerate/base/progress.hpp>

#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include "base/plain_text.hpp"
#include "base/terminal_line.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <iostream>
#include <utility>

namespace accelerate {
namespace {

using Clock = std::chrono::steady_clock;

// Whether stderr's last line is a bar that more will be written over.
std::atomic<bool> line_is_open{false};

constexpr const char* kEraseLine = "\r\033[K";

std::size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

constexpr const char* kBytes = "bytes";

std::string amount_text(std::int64_t amount, const std::string& unit) {
  return unit == kBytes ? text::format_bytes(amount) : std::to_string(amount);
}

std::string rate_text(double rate, const std::string& unit) {
  if (unit == kBytes) return text::format_bytes(static_cast<std::int64_t>(rate)) + "/s";
  if (rate < 1.0 && rate > 0.0) return text::fixed(1.0 / rate, 2) + " s each";
  return text::fixed(rate, rate >= 100.0 ? 0 : 2) + " " + unit + "/s";
}

extern "C" void end_line_and_process(int number) {
  if (line_is_open.exchange(false)) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, "\n", 1);
  }
  ::raise(number);  // which does what it did before, as this handler is for one time
}

// The shell's prompt begins a line of its own after Ctrl-C. Programs that handle the signals
// themselves decide for themselves.
void end_line_on_signals() {
  static const bool done = [] {
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action {};
      if (::sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
      action.sa_handler = end_line_and_process;
      action.sa_flags = static_cast<int>(SA_RESETHAND);
      ::sigaction(number, &action, nullptr);
    }
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

void detail::clear_terminal_line() {
  if (line_is_open.exchange(false)) std::cerr << kEraseLine << std::flush;
}

struct Progress::State {
  ProgressOptions options;
  std::ostream& out;
  bool enabled;
  bool terminal;
  Clock::duration interval;
  std::int64_t done;
  std::string text;
  Clock::time_point start = Clock::now();
  Clock::time_point written = start;
  std::int64_t done_when_written;
  double rate = 0.0;  // per second, smoothed over the latest writings

  explicit State(ProgressOptions given)
      : options(std::move(given)),
        out(options.output() != nullptr ? *options.output() : std::cerr),
        enabled(options.enabled().value_or(log::rank() == 0)),
        terminal(
            options.terminal().value_or(options.output() == nullptr && isatty(STDERR_FILENO) == 1)),
        interval(std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(options.interval().value_or(terminal ? 0.1 : 10.0)))),
        done(options.initial()),
        done_when_written(done) {}

  bool on_stderr() const { return options.output() == nullptr; }

  void set(std::int64_t value) {
    done = value;
    if (!enabled) return;
    const auto now = Clock::now();
    if (now - written >= interval && !is_early(now)) write(now);
  }

  bool is_early(Clock::time_point now) const {
    return std::chrono::duration<double>(now - start).count() < options.delay();
  }

  void write(Clock::time_point now) {
    const double since = std::chrono::duration<double>(now - written).count();
    if (since > 0.0) {
      const double latest = static_cast<double>(done - done_when_written) / since;
      rate = rate > 0.0 ? 0.3 * latest + 0.7 * rate : latest;
    }
    written = now;
    done_when_written = done;
    show(line(now));
  }

  // The whole run's rate stands on the last line, and its time instead of an estimate.
  void write_last(Clock::time_point now) {
    const double elapsed = std::chrono::duration<double>(now - start).count();
    if (elapsed > 0.0) rate = static_cast<double>(done - options.initial()) / elapsed;
    show(line(now));
    if (terminal) out << "\n";
    out.flush();
    if (on_stderr()) line_is_open = false;
  }

  void show(const std::string& content) {
    if (terminal) {
      out << kEraseLine << content << std::flush;
      if (on_stderr()) {
        end_line_on_signals();
        line_is_open = true;
      }
    } else {
      out << content << "\n" << std::flush;
    }
  }

  std::string line(Clock::time_point now) const {
    const double elapsed = std::chrono::duration<double>(now - start).count();
    std::string before = options.description().empty() ? "" : options.description() + " ";
    std::string after = amount_text(done, options.unit());
    double share = -1.0;
    if (options.total()) {
      const std::int64_t total = *options.total();
      share = total > 0
                  ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0)
                  : 1.0;
      const std::string percent = text::fixed(share * 100.0, 0) + "%";
      before += std::string(4 - percent.size(), ' ') + percent;
      after += "/" + amount_text(total, options.unit());
    }
    if (options.unit() != kBytes) after += " " + options.unit();
    after += ", " + text::format_seconds(elapsed);
    if (options.total() && rate > 0.0 && done < *options.total()) {
      after += ", " + text::format_seconds(static_cast<double>(*options.total() - done) / rate) +
               " left";
    }
    after += ", " + rate_text(rate, options.unit());
    if (!text.empty()) after += ", " + text;

    constexpr std::size_t kWidestBar = 40;
    std::string bar;
    if (terminal && share >= 0.0) {
      const std::size_t taken = before.size() + after.size() + 5;  // " [", "] " and the cursor
      const std::size_t width = terminal_width();
      const std::size_t room = width > taken ? std::min(width - taken, kWidestBar) : 0;
      if (room >= 5) {
        const auto full = static_cast<std::size_t>(share * static_cast<double>(room));
        bar = "[" + std::string(full, '#') + std::string(room - full, '.') + "] ";
      }
    }
    std::string whole = before + (before.empty() || before.back() == ' ' ? "" : " ") + bar + after;
    if (terminal && whole.size() >= terminal_width())
      whole.resize(terminal_width() - 1);  // A wrapped line cannot be erased.
    return whole;
  }
};

Progress::Progress(ProgressOptions options) : state_(std::make_unique<State>(std::move(options))) {}
Progress::Progress(Progress&&) noexcept = default;
Progress& Progress::operator=(Progress&& other) noexcept {
  if (this != &other) {
    close();
    state_ = std::move(other.state_);
  }
  return *this;
}
Progress::~Progress() { close(); }

void Progress::advance(std::int64_t count) {
  if (state_) state_->set(state_->done + count);
}

void Progress::set(std::int64_t done) {
  if (state_) state_->set(done);
}

void Progress::text(std::string text) {
  if (state_) state_->text = std::move(text);
}

void Progress::close() {
  if (!state_ || !state_->enabled) return;
  const auto now = Clock::now();
  if (!state_->is_early(now)) state_->write_last(now);
  state_->enabled = false;
}

std::int64_t Progress::done() const { return state_ ? state_->done : 0; }

}  // namespace accelerate
