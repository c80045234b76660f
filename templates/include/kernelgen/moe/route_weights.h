// How the weights of a token's chosen experts are made of its logits.
#pragma once

namespace kernelgen {

enum class RouteWeights {
  kSoftmaxOfAll,       // probabilities among all experts
  kSoftmaxOfChosen,    // among the chosen ones
  kSigmoid,            // of each logit
  kSigmoidNormalized,  // divided by (their sum + kRouteEpsilon)
};

// DeepSeek-V3's published gate divides by the sum plus this.
constexpr double kRouteEpsilon = 1e-20;

}  // namespace kernelgen
