#include "ort/cuda_json.h"

#include <cctype>

namespace qknorm::cuda {

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json document() {
    Json out = value(0);
    skip_space();
    if (at_ != text_.size()) fail("the end");
    return out;
  }

 private:
  static constexpr int kDeepest = 16;

  [[noreturn]] void fail(const std::string& expected) const {
    throw JsonError("at character " + std::to_string(at_) + ": " + expected + " is expected");
  }

  void skip_space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
  }

  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void take(char wanted) {
    if (peek() != wanted) fail(std::string("'") + wanted + "'");
    ++at_;
  }

  // Whether another item follows; the closing bracket is taken.
  bool more(char close, bool first) {
    if (peek() == close) {
      ++at_;
      return false;
    }
    if (!first) take(',');
    return true;
  }

  std::string string() {
    take('"');
    const size_t end = text_.find_first_of("\"\\", at_);
    if (end == std::string::npos || text_[end] == '\\') fail("a string without escapes");
    std::string out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }

  int64_t number() {
    size_t used = 0;
    int64_t out = 0;
    try {
      out = std::stoll(text_.substr(at_, 24), &used);
    } catch (const std::exception&) {
      fail("a whole number");
    }
    at_ += used;
    if (at_ < text_.size() && std::string(".eE").find(text_[at_]) != std::string::npos) fail("a whole number");
    return out;
  }

  bool word(const char* wanted) {
    const std::string w = wanted;
    if (text_.compare(at_, w.size(), w) != 0) return false;
    at_ += w.size();
    return true;
  }

  Json value(int depth) {
    if (depth > kDeepest) fail("less nesting");
    Json out;
    switch (peek()) {
      case '{':
        out.kind_ = Json::Kind::kObject;
        ++at_;
        for (bool first = true; more('}', first); first = false) {
          std::string name = string();
          take(':');
          out.members_.insert_or_assign(std::move(name), value(depth + 1));
        }
        return out;
      case '[':
        out.kind_ = Json::Kind::kList;
        ++at_;
        for (bool first = true; more(']', first); first = false) out.items_.push_back(value(depth + 1));
        return out;
      case '"':
        out.kind_ = Json::Kind::kText;
        out.text_ = string();
        return out;
      default:
        out.kind_ = Json::Kind::kInteger;
        out.integer_ = word("true") ? 1 : word("false") ? 0 : number();
        return out;
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

Json Json::parse(const std::string& text) { return JsonReader(text).document(); }

void Json::require(Kind kind, const char* what) const {
  if (kind_ != kind) throw JsonError(std::string(what) + " is expected");
}

const Json& Json::at(const std::string& member) const {
  require(Kind::kObject, "an object");
  const auto found = members_.find(member);
  if (found == members_.end()) throw JsonError("member '" + member + "' is missing");
  return found->second;
}

const std::vector<Json>& Json::list() const {
  require(Kind::kList, "a list");
  return items_;
}

const std::string& Json::text() const {
  require(Kind::kText, "a string");
  return text_;
}

int64_t Json::integer() const {
  require(Kind::kInteger, "a whole number");
  return integer_;
}

}  // namespace qknorm::cuda
