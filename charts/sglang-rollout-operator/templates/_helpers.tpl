{{- define "operator.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "operator.account" -}}
{{- .Values.serviceAccount.name | default (include "operator.name" .) -}}
{{- end -}}

{{- /* Name of cluster-wide objects that releases in several namespaces may have. */ -}}
{{- define "operator.policy" -}}
{{- printf "%s-%s" .Release.Namespace (include "operator.name" .) -}}
{{- end -}}

{{- define "operator.selector" -}}
app.kubernetes.io/name: sglang-rollout-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* Reference of one of our images: (list . "coordinator") */ -}}
{{- define "operator.image" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $images := $root.Values.images -}}
{{- $digest := index $images.digests $name -}}
{{- if and $digest (not (regexMatch "^sha256:[0-9a-f]{64}$" $digest)) -}}
{{- fail (printf "images.digests.%s is no digest: it must be sha256: and 64 hexadecimal digits" $name) -}}
{{- end -}}
{{- $version := printf ":%s" ($images.tag | default $root.Chart.AppVersion) -}}
{{- if $digest -}}
{{- $version = printf "@%s" $digest -}}
{{- end -}}
{{- index $images $name | default (printf "%s/%s%s" $images.registry $name $version) -}}
{{- end -}}

{{- /* The watched namespaces as JSON; an empty list means all. */ -}}
{{- define "operator.namespaces" -}}
{{- if .Values.watchNamespaces -}}
{{- .Values.watchNamespaces | uniq | toJson -}}
{{- else if eq .Values.rbac.scope "Namespace" -}}
{{- list .Release.Namespace | toJson -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}
