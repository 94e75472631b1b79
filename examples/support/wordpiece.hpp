#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

namespace wordpiece {

/// BERT's tokenizer: text is cleaned and split at spaces, punctuation and ideographs, and each word
/// into the longest pieces that the vocabulary has (Wu et al., 2016; Devlin et al., 2019).
class Tokenizer {
 public:
  /// From a model's folder: tokenizer.json, or vocab.txt with tokenizer_config.json if there is
  /// one. Throws std::runtime_error when there is neither, or the file is not such a tokenizer's.
  explicit Tokenizer(const std::filesystem::path& folder);

  /// [CLS] pieces [SEP], cut to `most` of them.
  std::vector<std::int64_t> encode(const std::string& text, std::size_t most) const;
  std::int64_t padding() const noexcept { return padding_; }

 private:
  void read_json(const std::filesystem::path& file);
  void read_vocabulary(const std::filesystem::path& file);
  std::int64_t id(const std::string& piece) const;
  std::vector<std::u32string> words(const std::string& text) const;
  void split_word(const std::u32string& word, std::vector<std::int64_t>& ids) const;

  std::unordered_map<std::string, std::int64_t> vocabulary_;
  std::string continues_ = "##";
  std::size_t longest_word_ = 100;
  bool lower_case_ = true;
  bool strip_accents_ = true;
  bool split_ideographs_ = true;
  std::string unknown_token_ = "[UNK]";
  std::int64_t begin_ = 0, end_ = 0, unknown_ = 0, padding_ = 0;
};

}  // namespace wordpiece
