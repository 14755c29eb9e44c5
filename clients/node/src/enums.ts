/** The API's enums as words: "greedy" for VERIFY_ACCEPT_GREEDY. */

import type { DescEnum } from "@bufbuild/protobuf";

import { RebuildCauseSchema } from "./gen/quire/v1/admin_pb.js";
import { RoutingPolicySchema, SpeculationMethodSchema } from "./gen/quire/v1/runner_pb.js";
import { DataTypeSchema, PrioritySchema, VerifyAcceptSchema } from "./gen/quire/v1/types_pb.js";

export type Priority = "low" | "normal" | "high";
/** Which drafts `verify` keeps. "all": the caller truncates the cache. */
export type Accept = "all" | "greedy" | "sampled" | "speculative";
export type Policy = "order" | "local_first" | "cheapest";
export type Cause = "manual" | "cuda_context_poisoned" | "remote_auth_failure" | "remote_config_change";
export type FinishReason =
  | ("stop" | "length" | "content_filter" | "tool_calls")
  | ("error" | "cancelled" | "unlikely" | "uncertain");
/** Where the drafts of speculative decoding come from. */
export type SpeculationMethod = "prompt_lookup" | "draft_model";
/** Of a row of logits, or of a hidden state. */
export type NumberFormat = "f32" | "bf16" | "f16";

/** The value of a word; undefined for undefined. Throws RangeError. */
function numberOf(parameter: string, schema: DescEnum, word: string): number;
function numberOf(parameter: string, schema: DescEnum, word: string | undefined): number | undefined;
function numberOf(parameter: string, { values }: DescEnum, word: string | undefined): number | undefined {
  if (word === undefined) return undefined;
  const known = values.filter(({ number }) => number !== 0);
  const found = known.find(({ localName }) => localName.toLowerCase() === word);
  if (found) return found.number;
  const words = known.map(({ localName }) => localName.toLowerCase());
  throw new RangeError(`${parameter} is one of ${words.join(", ")}, not ${JSON.stringify(word)}`);
}

/** The word of a value; undefined: it is unset or unspecified. A value of a later version of the API is its number. */
export function wordOf({ value }: DescEnum, number: number | undefined): string | undefined {
  return !number ? undefined : (value[number]?.localName.toLowerCase() ?? String(number));
}

/** These throw RangeError for other words. */
export const priorityOf = (word?: Priority) => numberOf("priority", PrioritySchema, word);
export const acceptOf = (word: Accept) => numberOf("accept", VerifyAcceptSchema, word);
export const policyOf = (word?: Policy) => numberOf("policy", RoutingPolicySchema, word);
export const speculationMethodOf = (word: SpeculationMethod) => numberOf("its method", SpeculationMethodSchema, word);
export const causeOf = (word: Cause) => numberOf("cause", RebuildCauseSchema, word);
export const dataTypeOf = (parameter: string, word?: NumberFormat) => numberOf(parameter, DataTypeSchema, word);
