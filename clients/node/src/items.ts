/** Converts prompts, messages and settings to items of Execute, and checks them. */

import { create } from "@bufbuild/protobuf";

import { tokensOf } from "./batches.js";
import { durationOf } from "./duration.js";
import { speculationMethodOf, type SpeculationMethod } from "./enums.js";
import { ChatRole, type ExecuteItem, ExecuteItemSchema, ToolChoice } from "./gen/quire/v1/runner_pb.js";
import { type Fields, refuse, type Request } from "./methods.js";
import { samplingOf, type SamplingSettings, splitSampling, tokenMask, type Allowed } from "./options.js";

const ROLES = {
  system: ChatRole.SYSTEM,
  user: ChatRole.USER,
  assistant: ChatRole.ASSISTANT,
  tool: ChatRole.TOOL,
};

/** A tool call as in the OpenAI API. Arguments are JSON, or an object. */
export interface ChatToolCall {
  id: string;
  type?: string;
  function: { name: string; arguments: string | object };
}

export interface ChatMessage {
  role: keyof typeof ROLES;
  content?: string | null;
  tool_calls?: readonly ChatToolCall[] | null;
  tool_call_id?: string | null;
  name?: string | null;
  reasoning_content?: string | null;
}

/** A text to continue, token ids, or messages for the model's chat template. */
export type Prompt = string | readonly number[] | readonly ChatMessage[];

/** One of these kinds. A JSON schema is a string, or an object. */
export type ConstraintSettings = { jsonSchema: string | object } | { regex: string } | { lark: string } | { mask: Allowed };

/** Speculative decoding, which changes no text. */
export type SpeculationSettings = { method: SpeculationMethod; maxDraftTokens?: number };

/** Fields of ExecuteItem that are set as they are. */
type ItemFields = Omit<
  Fields<Request<typeof ExecuteItemSchema>>,
  "itemId" | "prompt" | "maxCostUsd" | "timeout" | keyof OwnSettings
>;

/** How texts are generated: settings of sampling, such as temperature and seed, and the fields of ExecuteItem. */
export interface TextSettings extends SamplingSettings, ItemFields, OwnSettings {}

interface OwnSettings {
  /** Default settings, such as `samplingDefaults` of `modelInfo()`. */
  sampling?: SamplingSettings;
  constraint?: ConstraintSettings;
  /** The server ends the item's samples after this time. The timeout of a call ends only the reading. */
  itemTimeoutMs?: number;
  speculation?: SpeculationMethod | SpeculationSettings;
  /**
   * As in the OpenAI API: {type: "function", function: {...}}. Texts are divided then. The prompt is messages, or the tokens of
   * one that shows them.
   */
  tools?: readonly object[];
  /** "auto", "none", "required", or the name of the function to call. */
  toolChoice?: string;
  /** False: a text has at most one call. */
  parallelToolCalls?: boolean;
  /** Divide texts into content, thoughts and tool calls also without tools. */
  answerParts?: boolean;
  /** Of the chat template, such as {enable_thinking: false}. */
  templateVariables?: object;
}

const TOOL_CHOICES: Record<string, ToolChoice> = { none: ToolChoice.NONE, required: ToolChoice.REQUIRED };
// What is an item's own.
const FIELDS = new Set([
  ...ExecuteItemSchema.fields.map(({ localName }) => localName).filter((name) => name !== "timeout"),
  "itemTimeoutMs",
  "tools",
  "toolChoice",
  "parallelToolCalls",
  "templateVariables",
]);

/** An item for `execute`; `itemId` identifies it in the chunks. Throws TypeError or RangeError for invalid arguments. */
export function item(
  prompt: Prompt,
  settings: TextSettings & { itemId?: string; maxCostUsd?: number } = {},
): ExecuteItem {
  const [own, rest] = splitSampling(settings);
  const { sampling, constraint, speculation, itemTimeoutMs, itemId = "0", ...others } = rest;
  const { tools, toolChoice, parallelToolCalls, answerParts, templateVariables, ...fields } = others;
  for (const name of Object.keys(rest)) {
    if (!FIELDS.has(name)) throw new TypeError(`an item has no setting ${name}: it has ${[...FIELDS].join(", ")}`);
  }
  return create(ExecuteItemSchema, {
    ...fields,
    itemId,
    prompt: promptOf(prompt, tools, templateVariables),
    answerParts: answerPartsOf(prompt, others),
    sampling: samplingOf(sampling, own),
    constraint: constraint && { kind: constraintOf(constraint) },
    speculation: speculation && speculationOf(speculation),
    timeout: durationOf(itemTimeoutMs),
  });
}

/** The items of `execute`. The ids of several prompts are "0", "1" and so on; they share the settings. */
export function itemsOf(asked: Prompt | readonly Prompt[] | readonly ExecuteItem[], settings: TextSettings): ExecuteItem[] {
  const first = typeof asked === "string" ? undefined : asked[0];
  if (isItem(first)) {
    const names = Object.keys(settings);
    if (names.length) throw new TypeError(`${names.join(", ")}: each item has settings of its own`);
    if (!(asked as unknown[]).every(isItem)) throw new TypeError("items and prompts do not go together: make each an item");
    return [...(asked as ExecuteItem[])];
  }
  const isSeveral = typeof first === "string" || Array.isArray(first);
  if (!isSeveral) return [item(asked as Prompt, settings)];
  return (asked as Prompt[]).map((prompt, at) => item(prompt, { ...settings, itemId: String(at) }));
}

function isItem(value: unknown): value is ExecuteItem {
  return (value as ExecuteItem | undefined)?.$typeName === ExecuteItemSchema.typeName;
}

function isChat(prompt: Prompt): prompt is readonly ChatMessage[] {
  return typeof prompt !== "string" && typeof prompt[0] === "object";
}

function promptOf(
  prompt: Prompt,
  tools: TextSettings["tools"],
  variables: object | undefined,
): Request<typeof ExecuteItemSchema>["prompt"] {
  if (isChat(prompt)) {
    const variablesJson = variables && JSON.stringify(variables);
    return { case: "chat", value: { messages: prompt.map(messageOf), toolsJson: toolsJson(tools), variablesJson } };
  }
  if (variables) throw new TypeError("templateVariables are for messages");
  if (typeof prompt !== "string") return { case: "tokens", value: { tokenIds: tokensOf(prompt) } };
  if (tools?.length) throw new TypeError("tools are for messages, or for the tokens of a prompt that shows them");
  return { case: "text", value: prompt };
}

/** Undefined: texts are not divided. The tools of a chat are in it. */
function answerPartsOf(prompt: Prompt, { tools, toolChoice = "auto", parallelToolCalls, answerParts }: TextSettings) {
  const isSingle = parallelToolCalls === false;
  if (!tools?.length && toolChoice === "auto" && !isSingle && !answerParts) return undefined;
  const isName = toolChoice !== "auto" && !Object.hasOwn(TOOL_CHOICES, toolChoice);
  return {
    toolsJson: isChat(prompt) ? undefined : toolsJson(tools),
    toolChoice: isName ? ToolChoice.REQUIRED : TOOL_CHOICES[toolChoice],
    function: isName ? toolChoice : undefined,
    singleCall: isSingle,
  };
}

function toolsJson(tools: TextSettings["tools"]): string | undefined {
  return tools?.length ? JSON.stringify(tools) : undefined;
}

function messageOf(message: ChatMessage) {
  const { role, content, tool_calls, tool_call_id, name, reasoning_content, ...others } = message;
  // What an OpenAI client returns has all other keys too, with null or an empty list.
  const isEmpty = (value: unknown) => value === null || value === undefined || (Array.isArray(value) && !value.length);
  refuse("a message", Object.fromEntries(Object.entries(others).filter(([, value]) => !isEmpty(value))));
  if (!Object.hasOwn(ROLES, role)) {
    throw new RangeError(`the role of a message is one of ${Object.keys(ROLES).join(", ")}, not ${JSON.stringify(role)}`);
  }
  if (typeof content !== "string" && !tool_calls?.length) throw new TypeError("the content of a message is a text");
  return {
    role: ROLES[role],
    content: content ?? undefined,
    toolCalls: (tool_calls ?? []).map((call, index) => {
      const { name: called, arguments: given } = call.function;
      return { index, id: call.id, name: called, argumentsJson: typeof given === "string" ? given : JSON.stringify(given) };
    }),
    toolCallId: tool_call_id ?? "",
    name: name ?? "",
    reasoningContent: reasoning_content ?? undefined,
  };
}

function speculationOf(speculation: SpeculationMethod | SpeculationSettings) {
  const settings = typeof speculation === "string" ? { method: speculation } : speculation;
  return { ...settings, method: speculationMethodOf(settings.method) };
}

function constraintOf(constraint: ConstraintSettings) {
  if ("jsonSchema" in constraint) {
    const { jsonSchema } = constraint;
    return { case: "jsonSchema", value: typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema) } as const;
  }
  if ("regex" in constraint) return { case: "regex", value: constraint.regex } as const;
  if ("lark" in constraint) return { case: "lark", value: constraint.lark } as const;
  return { case: "mask", value: tokenMask(constraint.mask) } as const;
}
