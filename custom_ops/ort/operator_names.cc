#include "ort/operator_names.h"

#include "qknorm/generated/spec.h"

namespace qknorm::ort {
namespace {

std::vector<std::string> numbered(const std::string& op) {
  std::vector<std::string> names = {op};
  for (int number = 2; number <= spec::kNamesPerOperator; ++number) names.push_back(op + "_" + std::to_string(number));
  return names;
}

}  // namespace

const std::vector<std::string>& names_of(const char* op) {
  static const std::vector<std::string> attention = numbered(spec::kAttentionOp);
  static const std::vector<std::string> rotary = numbered(spec::kRotaryOp);
  return op == attention.front() ? attention : rotary;
}

bool is_first_name(const std::string& name) { return name == spec::kAttentionOp || name == spec::kRotaryOp; }

}  // namespace qknorm::ort
