// As much JSON as the kernel pack's manifest needs: objects, lists, whole numbers, strings without escapes.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace qknorm::cuda {

// The text is not JSON, or a member is missing or of another kind; the message says where.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  static Json parse(const std::string& text);

  const Json& at(const std::string& member) const;
  const std::vector<Json>& list() const;
  const std::string& text() const;
  int64_t integer() const;

 private:
  friend class JsonReader;
  enum class Kind { kNothing, kObject, kList, kText, kInteger };

  void require(Kind kind, const char* what) const;

  Kind kind_ = Kind::kNothing;
  std::map<std::string, Json> members_;
  std::vector<Json> items_;
  std::string text_;
  int64_t integer_ = 0;
};

}  // namespace qknorm::cuda
