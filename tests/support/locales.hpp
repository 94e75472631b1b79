#pragma once

#include <unistd.h>

#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <locale>
#include <string>

namespace accelerate::testing {

/// Numbers as in German: 1.234.567,5.
struct GermanNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

/// While it lives, C++'s global locale writes numbers as in German. Needs no locale of the system.
class GermanStreams {
 public:
  GermanStreams()
      : before_(std::locale::global(std::locale(std::locale::classic(), new GermanNumbers))) {}
  ~GermanStreams() { std::locale::global(before_); }
  GermanStreams(const GermanStreams&) = delete;
  GermanStreams& operator=(const GermanStreams&) = delete;

 private:
  std::locale before_;
};

/// While it lives, printf and strtod read and write numbers as in German, by a locale of numbers
/// alone, made in a folder of its own where the system has the program localedef.
class GermanC {
 public:
  GermanC() {
    std::string folder = (std::filesystem::temp_directory_path() / "accelerate_locale_XXXXXX");
    if (mkdtemp(folder.data()) == nullptr) return;
    folder_ = folder;
    std::ofstream(folder_ / "source") << "LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \".\"\n"
                                         "grouping 3;3\nEND LC_NUMERIC\n";
    // That it warns of the categories that are not there is no error.
    const std::string command = "localedef -c -i " + (folder_ / "source").string() + " -f UTF-8 " +
                                (folder_ / "german.UTF-8").string() + " >/dev/null 2>&1";
    [[maybe_unused]] const int warned = std::system(command.c_str());
    setenv("LOCPATH", folder_.c_str(), 1);
    found_ = std::setlocale(LC_NUMERIC, "german.UTF-8") != nullptr;
  }
  ~GermanC() {
    std::setlocale(LC_NUMERIC, "C");
    unsetenv("LOCPATH");
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  GermanC(const GermanC&) = delete;
  GermanC& operator=(const GermanC&) = delete;

  bool found() const { return found_; }

 private:
  std::filesystem::path folder_;
  bool found_ = false;
};

}  // namespace accelerate::testing
