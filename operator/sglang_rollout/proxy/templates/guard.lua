-- Refuse requests that would end the engine's process, that exceed spec.engine.limits, or that name an adapter that is not loaded. The
-- filter makes such a body unreadable on its way to the server, and haproxy answers with a sentence.
--
-- SGLang does not check token ids outside the vocabulary, empty prompts and some numbers out of range. They end its scheduler, with all
-- running requests. For an unloaded adapter SGLang continues to give answers. The filter reads bodies as they pass, piece by piece,
-- without keeping them. It follows strings, objects and the lists of known fields, and refuses what it cannot read: other encodings,
-- bodies that are no object, and letters of keys that are written as escapes.

local Guard = { id = "guard", flags = filter.FLT_CFG_FL_HTX }
Guard.__index = Guard

-- Strings up to this length are read as a whole. A known key is shorter, also with every letter as an escape.
local LONGEST_KEY = 256

-- Objects inside each other. Python reads about 1000.
local DEEPEST = 500

-- Characters up to which one search for a pattern is faster than plain searches.
local SHORT_SPAN = 100

function Guard:new()
  return setmetatable({ rest = "", base = 0, key = {}, counts = {}, bytes = {}, samples = 1, prompts = 1, values = 0 }, Guard)
end

function Guard:start_analyze(_, channel)
  if not channel:is_resp() then
    filter.register_data_filter(self, channel)
  end
end

function Guard:http_headers(txn, message)
  if not message:is_resp() then
    self.fields = FIELDS[txn.sf:path()]
    self.vocabulary = tonumber(txn:get_var("txn.vocabulary"))
    local adapters = txn:get_var("txn.adapters")
    self.adapters = adapters ~= "?" and adapters or nil
    self.digits = self.vocabulary and ("%d"):rep(#tostring(self.vocabulary)) .. "%d*"
  end
end

function Guard:http_payload(txn, message)
  local piece = message:body()
  if not self.fields or not piece or #piece == 0 then
    return
  end
  if not self.refused then
    self.refused = self:read(self.rest .. piece)
    if self.refused then
      txn:set_var("txn.refused", self.refused)
      txn:set_var("txn.code", self.code)
    end
  end
  if self.too_large then
    message:set("") -- Only a body without Content-Length comes here, so the server need not receive the rest.
  elseif self.refused then
    message:set(("!"):rep(#piece))
  end
end

-- One piece, with what was left of the one before. Returns the sentence of a refusal.
function Guard:read(text)
  self.rest = ""
  if self.base + #text > SETTINGS.requestBytes then
    self.too_large = true
    return more_than(self, "The body", "bytes", "requestBytes")
  end
  local sentence = self:read_values(text) or self:check_size(#text - #self.rest + 1)
  self.base = self.base + #text - #self.rest
  return sentence
end

-- What most values of strings end with: , ] }
local PLAIN_END = { [44] = true, [93] = true, [125] = true }

-- Return the place after most strings that are values. Nil for keys, for strings with a backslash before a quote, and if the string or
-- what follows is in a later piece: read_string reads these.
local function plain_end(text, quote)
  local close = text:find('"', quote + 1, true)
  return close and text:byte(close - 1) ~= 92 and PLAIN_END[text:byte(close + 1)] and close + 1 or nil
end

-- Return true if a string at this place is a prompt, or a part of one.
function Guard:is_prompt()
  return self.depth == 1 and PROMPTS[self.key[1]]
end

-- Return true in the value of an image, audio or video.
function Guard:in_media()
  return self.sized and self.sized.limit == "mediaBytes"
end

function Guard:read_values(text)
  local at, sentence = 1, nil
  if not self.depth then
    at, sentence = self:read_start(text)
  end
  while at do
    if self.list then
      at, sentence = self:read_list(text, at)
    elseif self.inside then
      at = self:skip_string(text, at)
    elseif self.texts then
      at, sentence = self:read_texts(text, at)
    else
      local quote = text:find('"', at, true)
      if self.after_text or not quote or not text:find('^[,%s]*"', at) then
        sentence = self:read_between(text, at, quote)
        if sentence or not quote then
          return sentence
        end
      end
      local key, value = text:match('^"([%w_]*)"%s*:%s*()', quote)
      local prompt = self:is_prompt()
      local after = not key and not prompt and not self:in_media() and plain_end(text, quote)
      if key then
        at, sentence = self:read_key(text, quote, key, value)
      elseif after then
        at = after
      else
        at, sentence = self:read_string(text, quote)
      end
      if at then
        self.comma = nil
        sentence = not prompt and self:count_values(1) or nil
      end
      if sentence then
        return sentence
      end
    end
  end
  return sentence
end

-- Keys, and items of lists that are not read otherwise. SGLang's HTTP server writes a message about each value of a wrong type, which takes
-- hundreds of times the memory of the value.
function Guard:count_values(number)
  self.values = self.values + number
  if self.values > SETTINGS.valuesPerRequest then
    return more_than(self, "The body", "values", "valuesPerRequest")
  end
end

-- The commas between two strings. The first one belongs to one of the strings, which count themselves.
function Guard:count_commas(span)
  local number = select(2, span:gsub(",", ""))
  local sentence = self:count_values(number - ((self.comma or number == 0) and 0 or 1))
  self.comma = self.comma or number > 0
  return sentence
end

-- The start of the body. Python also reads UTF-16, UTF-32 and a byte order mark.
function Guard:read_start(text)
  local first = text:match("^%s*{%s*()")
  if first and text:find('^["}]', first) then
    self.depth = 1
    return first
  end
  if not text:find("^%s*{?%s*$") then
    return nil, no_object(self)
  end
  self:keep(text, 1)
end

-- Keep a part of the text for the next piece, without the blanks at its end, of which there may be many.
function Guard:keep(text, from)
  self.rest = text:sub(from):gsub("%s+$", "")
end

-- What is between two strings: the depth of objects changes. `quote` is where the next string begins, nil if in a later piece.
function Guard:read_between(text, at, quote)
  local span = text:sub(at, (quote or #text + 1) - 1)
  if self.after_text then
    if span:find('^%s*,%s*[^%s]') then
      return unreadable(self, "%s holds strings beside other values in one list: use token ids or texts.", self.after_text)
    end
    if not quote and span:find("^%s*,?%s*$") then
      self:keep(span, 1)
      return nil
    end
    self.after_text = nil
  end
  local above = self:count_commas(span)
  if above then
    return above
  end
  if #span > SHORT_SPAN and not span:find("{", 1, true) and not span:find("}", 1, true) then
    return nil
  end
  local place = 0
  while true do
    place = span:find("[{}]", place + 1)
    if not place then
      return nil
    end
    if span:byte(place) == 123 then -- {
      local sentence = self:is_prompt() and count_prompt(self, self.key[1])
      if sentence then
        return sentence
      end
      if self.depth == DEEPEST then
        return unreadable(self, "The body nests deeper than %d objects.", DEEPEST)
      end
      self.depth = self.depth + 1
      self.key[self.depth] = nil
    else
      self.depth = self.depth - 1
      if self.depth == 0 and self.listed and not self.batch then
        return refuse(self, "would_end_the_engine", "%s is a list, and the request has one prompt: write one value.", self.listed)
      end
      if self.sized and self.depth < self.sized.depth then
        local sentence = self:end_size(at + place - 1)
        if sentence then
          return sentence
        end
      end
    end
  end
end

-- Return the quote that ends a string, nil if it is in a later piece. A quote after an odd number of backslashes is a character.
local function string_end(text, start)
  local from = start
  while true do
    local quote = text:find('"', from, true)
    if not quote then
      return nil
    end
    local back = quote - 1
    while back >= start and text:byte(back) == 92 do
      back = back - 1
    end
    if (quote - back) % 2 == 1 then
      return quote
    end
    from = quote + 1
  end
end

-- The rest of a string that is too long to be kept.
function Guard:skip_string(text, at)
  local close = string_end(text, at + self.inside)
  if close then
    self.inside = nil
    return close + 1
  end
  local back = #text
  while back >= at + self.inside and text:byte(back) == 92 do
    back = back - 1
  end
  self.inside = (#text - back) % 2
end

-- Return true if a key has letters, digits or _ that are written as escapes.
local function hides_letters(key)
  for code in key:gsub("\\\\", ""):gmatch("\\u00(%x%x)") do
    if string.char(tonumber(code, 16)):find("[%w_]") then
      return true
    end
  end
end

-- A string: a key if a colon follows, else a value.
function Guard:read_string(text, quote)
  local close = string_end(text, quote + 1)
  if not close and #text - quote < (self:in_media() and PLACE_WINDOW or LONGEST_KEY) then
    self.rest = text:sub(quote)
    return nil
  end
  local after = close and (PLAIN_END[text:byte(close + 1)] and close + 1 or text:find("[^%s]", close + 1))
  if close and not after and close - quote < LONGEST_KEY then
    self:keep(text, quote)
    return nil
  end
  if after and text:byte(after) == 58 then -- :
    local key = text:sub(quote + 1, close - 1)
    if key:find("\\u", 1, true) and hides_letters(key) then
      return nil, unreadable(self, "A key has letters that are written as escapes. Write keys plainly.")
    end
    return self:read_key(text, quote, key, after + 1)
  end
  local sentence = self:check_string(text, quote, close)
  if sentence then
    return nil, sentence
  end
  if not close then
    self.inside = 0
    return quote + 1
  end
  return close + 1
end

function Guard:check_string(text, quote, close)
  if self:in_media() then
    return check_place(self, self.key[self.depth] or self.sized.key, text:sub(quote + 1, math.min((close or #text + 1) - 1, quote + PLACE_WINDOW)))
  end
  if not self:is_prompt() then
    return nil
  end
  local key = self.key[1]
  if close == quote + 1 and NEVER_EMPTY[key] and self.fields[key] then
    return is_empty(self, key)
  end
  self.after_text = TEXTS_OR_TOKENS[key] and self.fields[key] and key or nil
  return count_prompt(self, key)
end

-- A key, and its value if that is a string without a meaning here. `from` is a place between the colon and the value.
function Guard:read_key(text, quote, key, from)
  local depth = self.depth
  if self.sized and depth <= self.sized.depth then
    local sentence = self:end_size(quote)
    if sentence then
      return nil, sentence
    end
  end
  self.key[depth] = key
  local sampling = depth > 1 and self.key[1] == "sampling_params" and self.fields.sampling_params
  local read = self.fields[key]
  if not read or depth > 2 or (depth == 2 and not sampling) then
    -- Messages of the system may have tools of their own.
    read = depth == 2 and key == "tools" and self.key[1] == "messages" and self.fields.tools or MEDIA_KEYS[key]
  end
  if sampling and depth == 3 and self.key[2] == "logit_bias" then
    read = bias
  end
  local typed = sampling and depth == 2 and SAMPLING_TYPES[key]
  if not read and not typed then
    return text:byte(from) == 34 and not self:is_prompt() and not self:in_media() and plain_end(text, from) or from
  end
  local value = text:find("[^%s]", from)
  if not value then
    self:keep(text, quote)
    return nil
  end
  local wrong = typed and check_type(self, text, value, key)
  if wrong then
    return nil, wrong
  end
  if not read then
    return value
  end
  local at, sentence = read(self, text, value, key)
  if not at and not sentence and read == adapter then
    self.rest = text:sub(quote) -- blanks at the end may be part of a name
  elseif not at and not sentence then
    self:keep(text, quote)
  end
  return at, sentence
end

-- Sizes of values.

function Guard:check_size(place)
  local found = self.sized
  if not found then
    return nil
  end
  if (self.bytes[found.limit] or 0) + self.base + place - found.start > SETTINGS[found.limit] then
    return more_than(self, found.subject .. found.key, "bytes", found.limit)
  end
end

function Guard:end_size(place)
  local sentence = self:check_size(place)
  local found = self.sized
  self.bytes[found.limit] = (self.bytes[found.limit] or 0) + self.base + place - found.start
  self.sized = nil
  return sentence
end
